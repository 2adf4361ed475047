"""Clients, by API keys or without them by connections and addresses, and the limits of their connections."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.fairness.quota import TokenBucket
from omnirelay.errors import BusyError, SlowClientError, UnauthenticatedError
from omnirelay.protocol import GenerateRequest
from shared.config import MediaConfig

RETRY_OWN_REQUESTS_MS: Final = 1000
NO_KEY: Final = "missing or invalid API key"
"""The same for a missing, wrong and withdrawn key."""


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one client; none means no limit besides the general ones.

    Attributes:
        requests_per_second: Average rate of new requests, 0.000001 to 1,000,000.
        burst: Most new requests at once; default: those of one second.
        max_requests: Open requests.
        request_bytes: Largest request, media included.
        best_priority: Most urgent (smallest) priority; more urgent requests get this one.
    """

    requests_per_second: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    burst: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    request_bytes: Annotated[int, Meta(ge=1)] | None = None
    best_priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0


@dataclass(eq=False)
class Principal:
    """One client over all of its connections.

    Attributes:
        name: Of its quota, and for the log; not secret.
        known: False if it has not identified itself, or its key was removed.
        taken: Number of admitted requests.
        refused: Number of requests beyond its own limits.
        keyed: It is the holder of a key.
    """

    name: str
    limits: ClientLimits = field(default_factory=ClientLimits)
    known: bool = True
    taken: int = 0
    refused: int = 0
    keyed: bool = False
    open_requests: int = 0

    def __post_init__(self) -> None:
        self.change(self.limits)

    def change(self, limits: ClientLimits) -> None:
        """Replace the limits."""
        self.limits = limits
        rate = limits.requests_per_second
        self._bucket = TokenBucket(rate, limits.burst or math.ceil(rate)) if rate is not None else None

    def most_bytes(self, most: int) -> int:
        """The largest request that it may send, of those with at most so many bytes."""
        own = self.limits.request_bytes
        return most if own is None else min(most, own)

    def media(self, media: MediaConfig) -> MediaConfig:
        """The limits of its media, of those for all."""
        bounds = {
            name: self.most_bytes(getattr(media, name)) for name in ("max_item_bytes", "max_request_bytes")
        }
        return media.model_copy(update=bounds)

    def check(self) -> None:
        """Reject a request before it is read: UnauthenticatedError, or BusyError beyond its limits."""
        if not self.known:
            raise UnauthenticatedError(NO_KEY)
        most = self.limits.max_requests
        if most is not None and self.open_requests >= most:
            self.refused += 1
            raise BusyError(f"this key may have {most} open requests, no more", RETRY_OWN_REQUESTS_MS)
        if self._bucket is not None and (wait_s := self._bucket.wait_s()):
            self.refused += 1
            raise BusyError(
                f"this key may send {self.limits.requests_per_second:g} requests a second, no more",
                math.ceil(1000 * wait_s),
            )

    def open(self) -> None:
        """Count a request; raises as :meth:`check` does."""
        self.check()
        if self._bucket is not None:
            self._bucket.take()
        self.open_requests += 1
        self.taken += 1

    def close(self) -> None:
        """A request has ended."""
        self.open_requests -= 1


UNREAD_OF_ONE: Final = 2**20
"""Unread bytes that a connection may always have."""


@dataclass
class Unread:
    """Unread answers of all clients, in bytes; ``requests`` are those whose end has not been read.

    Beyond ``limit``, connections with more than :data:`UNREAD_OF_ONE` unread get no more.
    """

    limit: int
    total: int = 0
    requests: int = 0


@dataclass(eq=False)
class ClientAccount:
    """Counts what one connection of a client has open and unread."""

    name: str
    max_requests: int
    _max_backlog_bytes: int
    client: Principal
    _unread: Unread
    open_requests: int = 0
    backlog_bytes: int = 0

    @property
    def share(self) -> str:
        """The quota that it uses."""
        return self.client.name

    def allowed(self, request: GenerateRequest) -> GenerateRequest:
        """The request, with its priority limited to what the client may use."""
        best = self.client.limits.best_priority
        return request if request.priority >= best else msgspec.structs.replace(request, priority=best)

    def open(self) -> None:
        """Count a request; BusyError if there are too many, UnauthenticatedError if the key was withdrawn."""
        if self.open_requests >= self.max_requests:
            raise self.busy()
        self.client.open()
        self.open_requests += 1
        self._unread.requests += 1

    def end(self) -> None:
        """A request has ended and been read."""
        self.open_requests -= 1
        self._unread.requests -= 1
        self.client.close()

    def busy(self) -> BusyError:
        """The error for one request too many."""
        return BusyError(
            f"this connection has {self.max_requests} open requests, the maximum", RETRY_OWN_REQUESTS_MS
        )

    def charge(self, size: int) -> None:
        """Count unread bytes; SlowClientError if they exceed the limit."""
        if self.backlog_bytes + size > self._max_backlog_bytes:
            raise self._too_slow(self._max_backlog_bytes)
        unread = self._unread
        if unread.total + size > unread.limit and self.backlog_bytes > UNREAD_OF_ONE:
            raise self._too_slow(UNREAD_OF_ONE)
        self.backlog_bytes += size
        unread.total += size

    def release(self, size: int) -> None:
        """Bytes were read, or dropped."""
        self.backlog_bytes -= size
        self._unread.total -= size

    def _too_slow(self, most: int) -> SlowClientError:
        return SlowClientError(
            f"{self.backlog_bytes} bytes of answers are unread, at most {most} are buffered now"
        )

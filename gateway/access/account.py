"""Limits of one connection: open requests and unread bytes."""

from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.access.clients import RETRY_OWN_REQUESTS_MS, Principal
from omnirelay.errors import BusyError, SlowClientError
from omnirelay.protocol import GenerateRequest

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

"""Who asks: the holder of an API key, or, where there are no keys, a connection or an address."""

import math
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.fairness.rate_limit import TokenBucket
from omnirelay.errors import BusyError, UnauthenticatedError

RETRY_OWN_REQUESTS_MS: Final = 1000
NO_KEY: Final = "this gateway asks for an API key, and this request brings none that it knows"
"""Whether a key is missing, wrong or withdrawn is told to nobody."""


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one client may do; none is no bound besides those that hold for all.

    Attributes:
        requests_per_second: How many requests it may begin in a second, on average: 0.000001 to 1,000,000.
        burst: How many at once, after a pause; the default is those of one second.
        max_requests: How many may be open at once: prepared, waiting, being answered, or being read.
        request_bytes: Largest request, media included.
        best_priority: The most urgent priority, which is the smallest; more urgent requests get this one.
    """

    requests_per_second: Annotated[float, Meta(ge=1e-6, le=1e6)] | None = None
    burst: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    request_bytes: Annotated[int, Meta(ge=1)] | None = None
    best_priority: Annotated[int, Meta(ge=-1000, le=1000)] = -1000


class Principal:
    """One client over all of its connections.

    Args:
        name: For the log, and what its share goes by; no secret.
        limits: What it may do.
        known: False for who has not said, or says no more, who it is.
        counted: What was taken and refused of it before.

    Attributes:
        open_requests: How many of its requests are open.
        taken: How many requests have been taken since the start.
        refused: How many were one too many for a limit of its own.
    """

    def __init__(
        self,
        name: str,
        limits: ClientLimits | None = None,
        known: bool = True,
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        self.name: Final = name
        self.known = known
        self.open_requests = 0
        self.taken, self.refused = counted
        self.change(limits or ClientLimits())

    @property
    def limits(self) -> ClientLimits:
        """What it may do."""
        return self._limits

    def change(self, limits: ClientLimits) -> None:
        """Let other limits hold from now on."""
        self._limits = limits
        rate = limits.requests_per_second
        self._bucket = TokenBucket(rate, limits.burst or math.ceil(rate)) if rate is not None else None

    def check(self) -> None:
        """Refuse a request that :meth:`open` would refuse now, before it is read.

        Raises:
            UnauthenticatedError: It is not known.
            BusyError: The client has as many requests open as it may, or has begun too many.
        """
        if not self.known:
            raise UnauthenticatedError(NO_KEY)
        most = self._limits.max_requests
        if most is not None and self.open_requests >= most:
            self.refused += 1
            raise BusyError(
                f"this key may have {most} requests open, no more are taken", RETRY_OWN_REQUESTS_MS
            )
        if self._bucket is not None and (wait_s := self._bucket.wait_s()):
            self.refused += 1
            raise BusyError(
                f"this key may begin {self._limits.requests_per_second:g} requests a second, not more",
                math.ceil(1000 * wait_s),
            )

    def open(self) -> None:
        """Count one more request.

        Raises:
            UnauthenticatedError: It is not known.
            BusyError: The client has as many requests open as it may, or has begun too many.
        """
        self.check()
        if self._bucket is not None:
            self._bucket.take()
        self.open_requests += 1
        self.taken += 1

    def close(self) -> None:
        """Count one less."""
        self.open_requests -= 1

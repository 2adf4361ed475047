"""Quotas that no single client can exhaust, of places, bytes and memory; and a limit on a rate."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from omnirelay.errors import BusyError

TIMES_FREE: Final = 4
"""Alone, a client gets four fifths."""


class Quota:
    """Places or bytes; a client gets no more while it holds ``times_free`` times the units that are free."""

    def __init__(self, total: int, times_free: int = TIMES_FREE) -> None:
        self.total = total
        self._times_free = times_free
        self.used = 0
        self._own: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """Units that nobody holds; none while the total is less than what is held."""
        return max(self.total - self.used, 0)

    def own(self, client: str) -> int:
        """Units that a client holds."""
        return self._own[client]

    def has_for(self, client: str, size: int = 1, besides: int = 0) -> bool:
        """Whether a client may take more; ``besides`` units that it holds are not counted against it."""
        own = self._own[client] - besides
        return size <= self.free and (not own or own < self._times_free * self.free)

    def take(self, client: str, size: int = 1) -> None:
        """Take units, without asking :meth:`has_for`."""
        self.used += size
        self._own[client] += size

    def give(self, client: str, size: int = 1) -> None:
        """Return units."""
        self.used -= size
        self._own[client] -= size
        if not self._own[client]:
            del self._own[client]


class MemoryBudget:
    """Bounds the bytes that the media of all open requests take, fairly among clients."""

    def __init__(self, limit: int, retry_after_ms: Callable[[], int]) -> None:
        self.quota: Final = Quota(limit)
        self.retry_after_ms: Final = retry_after_ms

    @property
    def total(self) -> int:
        """Bytes in use."""
        return self.quota.used

    def of(self, client: str) -> "Hold":
        """Hold nothing yet, for a client."""
        return Hold(self, client)


@dataclass(eq=False)
class Hold:
    """The bytes that one request holds, charged to its client."""

    budget: MemoryBudget
    client: str
    size: int = 0

    def grow(self, size: int) -> None:
        """Take more bytes; BusyError if they do not fit."""
        quota = self.budget.quota
        if size and not quota.has_for(self.client, size, besides=self.size):
            raise BusyError(
                f"{quota.used} bytes of media are held, no room for {size} more (gateway.limits.held_bytes "
                f"is {quota.total}, and this client holds {quota.own(self.client)}): try again later",
                self.budget.retry_after_ms(),
            )
        quota.take(self.client, size)
        self.size += size

    def shrink(self, size: int) -> None:
        """Return some of the bytes."""
        self.budget.quota.give(self.client, size)
        self.size -= size

    def split(self, size: int) -> "Hold":
        """Move some of the bytes to a hold of their own."""
        self.size -= size
        return Hold(self.budget, self.client, size)

    def release(self) -> None:
        """Return all bytes; may be called again."""
        self.shrink(self.size)


class TokenBucket:
    """Limits a rate: ``per_second`` on average, at most ``burst`` at once."""

    def __init__(self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second: Final = per_second
        self._burst: Final = burst
        self._clock = clock
        self._tokens = float(burst)
        self._at = clock()

    def wait_s(self, tokens: float = 1) -> float:
        """Seconds until so many tokens are available."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_second)
        self._at = now
        return max(0.0, (tokens - self._tokens) / self._per_second)

    def take(self, tokens: float = 1) -> None:
        """Take tokens, which are available or are waited for."""
        self._tokens -= tokens

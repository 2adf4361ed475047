"""Memory for the media of open requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.fairness.quota import Quota
from omnirelay.errors import BusyError


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

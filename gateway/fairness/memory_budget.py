"""Memory for the media of open requests."""

from collections.abc import Callable
from typing import NamedTuple

from gateway.fairness.quota import Quota
from omnirelay.errors import BusyError


class MemoryBudget:
    """Bounds the bytes that the media of all open requests take, fairly among clients."""

    def __init__(self, limit: int, retry_after_ms: Callable[[], int]) -> None:
        self._quota = Quota(limit)
        self._retry_after_ms = retry_after_ms

    @property
    def total(self) -> int:
        """Bytes in use."""
        return self._quota.used

    def of(self, client: str) -> "ClientBudget":
        """The same budget, charged to one client."""
        return ClientBudget(self, client)

    def take(self, client: str, size: int, besides: int = 0) -> None:
        """Charge bytes, or raise BusyError; ``besides`` are what the same request holds already."""
        if size and not self._quota.has_for(client, size, besides):
            own, total = self._quota.own(client), self._quota.used
            raise BusyError(
                f"{total} bytes of media are held, no room for {size} more (gateway.limits.held_bytes is "
                f"{self._quota.total}, and this client holds {own}): try again later",
                self._retry_after_ms(),
            )
        self._quota.take(client, size)

    def give(self, client: str, size: int) -> None:
        """Return bytes."""
        self._quota.give(client, size)


class ClientBudget(NamedTuple):
    """A memory budget and the client to charge."""

    budget: MemoryBudget
    client: str


class Hold:
    """The bytes that one request holds."""

    def __init__(self, budget: ClientBudget) -> None:
        self._budget, self.client = budget
        self.size = 0

    def grow(self, size: int) -> None:
        """Take more bytes; BusyError if they do not fit."""
        self._budget.take(self.client, size, self.size)
        self.size += size

    def shrink(self, size: int) -> None:
        """Return some of the bytes."""
        self._budget.give(self.client, size)
        self.size -= size

    def split(self, size: int) -> "Hold":
        """Move some of the bytes to a hold of their own."""
        rest = Hold(self._budget.of(self.client))
        rest.size = size
        self.size -= size
        return rest

    def release(self) -> None:
        """Return all bytes; may be called again."""
        self._budget.give(self.client, self.size)
        self.size = 0

"""How many bytes of clients' files the gateway holds for requests."""

from collections.abc import Callable
from copy import copy
from typing import Final

from gateway.fairness.quota import Quota
from omnirelay.errors import BusyError


class MemoryBudget:
    """The bytes of media that all living requests hold together, bounded; no client may hold all of them.

    Args:
        limit: Most bytes.
        retry_after_ms: Says when a request that finds no room should come again.
    """

    def __init__(self, limit: int, retry_after_ms: Callable[[], int]) -> None:
        self._portions = Quota(limit)
        self._retry_after_ms = retry_after_ms
        self.client = ""

    @property
    def total(self) -> int:
        """What all hold together."""
        return self._portions.used

    def of(self, client: str) -> "MemoryBudget":
        """The same bytes, as one client holds them."""
        view = copy(self)
        view.client = client
        return view

    def take(self, size: int, besides: int = 0) -> None:
        """Count more bytes for the client.

        Args:
            size: How many.
            besides: What it holds for the same request already.

        Raises:
            BusyError: There is no room for them.
        """
        if size and not self._portions.has_for(self.client, size, besides):
            own, total = self._portions.own(self.client), self._portions.used
            raise BusyError(
                f"{total} bytes of media are held, no room for {size} more (gateway.limits.held_bytes is "
                f"{self._portions.total}, and this client holds {own}): try again later",
                self._retry_after_ms(),
            )
        self._portions.take(self.client, size)

    def give(self, size: int) -> None:
        """Count fewer bytes for the client."""
        self._portions.give(self.client, size)


class Hold:
    """What one request holds of them.

    Args:
        held: Where it is counted, as its client's (:meth:`MemoryBudget.of`).
    """

    def __init__(self, held: MemoryBudget) -> None:
        self._held: Final = held
        self.size = 0

    @property
    def client(self) -> str:
        """Whose request it is."""
        return self._held.client

    def grow(self, size: int) -> None:
        """Count more bytes for the request.

        Raises:
            BusyError: There is no room for them.
        """
        self._held.take(size, self.size)
        self.size += size

    def release(self) -> None:
        """Count none any more; may be called again."""
        self._held.give(self.size)
        self.size = 0

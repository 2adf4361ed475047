"""Room that is waited for: clients get it in turn, and no single one gets all of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from gateway.fairness.fair_queue import FairQueue
from gateway.fairness.quota import Quota


class FairSemaphore:
    """Places or bytes that many want at once; who finds none waits for its turn.

    One that does not fit yet holds up all behind it, so that smaller ones do not overtake it for ever; a
    client that has as much as one may holds up nobody but itself.

    Args:
        total: How much there is; one that wants more gets it when nobody has any.
    """

    def __init__(self, total: int) -> None:
        self._portions = Quota(total)
        self._line = FairQueue(lambda client: self._portions.own(client) > 0)
        self._waiting: dict[str, tuple[asyncio.Future[None], int]] = {}
        self._names = count()

    @property
    def used(self) -> int:
        """What is taken."""
        return self._portions.used

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def take(self, size: int, client: str = "") -> AsyncIterator[None]:
        """Wait for room, and keep it."""
        await self.enter(size, client)
        try:
            yield
        finally:
            self.leave(size, client)

    async def enter(self, size: int, client: str) -> None:
        """Wait for room; give it back by :meth:`leave`."""
        name = str(next(self._names))
        granted = asyncio.get_running_loop().create_future()
        self._waiting[name] = granted, size
        self._line.join(name, client)
        self._wake()
        try:
            await granted
        except asyncio.CancelledError:
            if name in self._waiting:
                del self._waiting[name]
                self._line.leave(name, client)
                self._wake()
            else:
                # Both came in the same turn of the loop: it was granted, and nobody is there to take it.
                self.leave(size, client)
            raise

    def leave(self, size: int, client: str) -> None:
        """Give room back."""
        self._portions.give(client, size)
        self._wake()

    def _wake(self) -> None:
        """Grant what can be granted."""
        while (first := self._line.first(self._may)) is not None:
            client, name = first
            granted, size = self._waiting[name]
            if self._portions.used and size > self._portions.free:
                return
            self._line.serve(client)
            self._portions.take(client, size)
            del self._waiting[name]
            granted.set_result(None)

    def _may(self, client: str) -> bool:
        return not self._portions.own(client) or self._portions.has_for(client, 0)

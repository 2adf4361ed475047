"""A semaphore whose waiters take turns by client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

from gateway.fairness.fair_queue import FairQueue
from gateway.fairness.quota import Quota


class FairSemaphore:
    """Units that clients wait for; a waiter that wants more than all gets them when none are taken.

    A waiter that does not fit yet blocks those behind it, so that smaller ones do not starve it; a client at
    its quota blocks only itself.
    """

    def __init__(self, total: int) -> None:
        self._quota = Quota(total)
        self._queue = FairQueue(lambda client: self._quota.own(client) > 0)
        self._waiting: dict[str, tuple[asyncio.Future[None], int]] = {}
        self._names = count()

    @asynccontextmanager
    async def take(self, size: int, client: str = "") -> AsyncIterator[None]:
        """Hold units inside a block."""
        await self.enter(size, client)
        try:
            yield
        finally:
            self.leave(size, client)

    async def enter(self, size: int, client: str) -> None:
        """Wait for units; return them by :meth:`leave`."""
        name = str(next(self._names))
        granted = asyncio.get_running_loop().create_future()
        self._waiting[name] = granted, size
        self._queue.join(name, client)
        self._wake()
        try:
            await granted
        except asyncio.CancelledError:
            if name in self._waiting:
                del self._waiting[name]
                self._queue.leave(name, client)
                self._wake()
            else:
                # Granted and cancelled in the same turn of the loop.
                self.leave(size, client)
            raise

    def leave(self, size: int, client: str) -> None:
        """Return units."""
        self._quota.give(client, size)
        self._wake()

    def _wake(self) -> None:
        own, has_for = self._quota.own, self._quota.has_for
        while (first := self._queue.first(lambda each, _: not own(each) or has_for(each, 0))) is not None:
            client, name = first
            granted, size = self._waiting[name]
            if self._quota.used and size > self._quota.free:
                return
            self._queue.serve(client, name)
            self._quota.take(client, size)
            del self._waiting[name]
            # Else it was cancelled in this turn of the loop, and returns its units.
            if not granted.cancelled():
                granted.set_result(None)

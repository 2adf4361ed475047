"""A semaphore whose waiters take turns by client, and a thread that clients use in turn."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any, TypeVar

from gateway.fairness.fair_queue import FairQueue
from gateway.fairness.quota import Quota
from omnirelay.errors import CancelledRequestError


class FairSemaphore:
    """Places that clients wait for in turn; a client at its quota blocks only itself."""

    def __init__(self, total: int) -> None:
        self._quota = Quota(total)
        self._queue = FairQueue(lambda client: self._quota.own(client) > 0)
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._names = count()

    @asynccontextmanager
    async def take(self, client: str = "") -> AsyncIterator[None]:
        """Hold a place inside a block."""
        await self.enter(client)
        try:
            yield
        finally:
            self.leave(client)

    async def enter(self, client: str) -> None:
        """Wait for a place; return it by :meth:`leave`."""
        name = str(next(self._names))
        granted = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._queue.join(name, client)
        self._wake()
        try:
            await granted
        except asyncio.CancelledError:
            if self._waiting.pop(name, None) is None:
                # Granted and cancelled in the same turn of the loop.
                self.leave(client)
            else:
                self._queue.leave(name, client)
            raise

    def leave(self, client: str) -> None:
        """Return a place."""
        self._quota.give(client)
        self._wake()

    def _wake(self) -> None:
        while (first := self._queue.first(lambda client, _: self._quota.has_for(client))) is not None:
            client, name = first
            self._queue.serve(client, name)
            self._quota.take(client)
            granted = self._waiting.pop(name)
            # Else it was cancelled in this turn of the loop, and returns its place.
            if not granted.cancelled():
                granted.set_result(None)


T = TypeVar("T")


class FairThread:
    """One thread for work that would delay the event loop, shared fairly among clients."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._turn = FairSemaphore(1)
        self._closing = False

    async def run(self, client: str, function: Callable[..., T], *arguments: object) -> T:
        """Run a function on the thread; CancelledRequestError if the gateway stops."""
        # Not queued in the executor, which would keep the data of cancelled requests.
        await self._turn.enter(client)
        if self._closing:
            self._turn.leave(client)
            raise CancelledRequestError("the gateway is shutting down")
        job = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        job.add_done_callback(partial(self._ended, client))
        return await asyncio.shield(job)

    async def timed(self, client: str, function: Callable[[], T]) -> tuple[T, float]:
        """As :meth:`run`; return also how many seconds of a core the function took."""

        def work() -> tuple[T, float]:
            begun = time.thread_time()
            return function(), time.thread_time() - begun

        return await self.run(client, work)

    def close(self) -> None:
        """Start nothing more."""
        self._closing = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ended(self, client: str, job: "asyncio.Future[Any]") -> None:
        self._turn.leave(client)
        if not job.cancelled():
            # Read, or asyncio would log the error of one whose caller was cancelled.
            job.exception()

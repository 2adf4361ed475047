"""A thread that clients use in turn."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from gateway.fairness.semaphore import FairSemaphore
from omnirelay.errors import CancelledRequestError

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
        await self._turn.enter(1, client)
        if self._closing:
            self._turn.leave(1, client)
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
        self._turn.leave(1, client)
        if not job.cancelled():
            # Read, or asyncio would log the error of one whose caller was cancelled.
            job.exception()

"""The one thread for what takes long of requests, which clients get in turn."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gateway.fairness.semaphore import FairSemaphore
from omnirelay.errors import CancelledRequestError

T = TypeVar("T")


class PromptExecutor:
    """One thread: tokenizing a long prompt must not hold up the streams, and prompts wait in line."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "prompts")
        self._turn = FairSemaphore(1)
        self._closing = False

    async def run(self, client: str, function: Callable[..., T], *arguments: object) -> T:
        """Run something that takes long.

        It waits for its turn here and not in the executor, which would keep what it works on of a request
        that has been cancelled meanwhile.

        Args:
            client: For whom.
            function: What.
            *arguments: Of the function.

        Raises:
            CancelledRequestError: The gateway stops.
        """
        await self._turn.enter(1, client)
        if self._closing:
            self._turn.leave(1, client)
            raise CancelledRequestError("the gateway is shutting down")
        leave = partial(self._turn.leave, 1, client)
        job = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        job.add_done_callback(lambda _: leave())
        return await asyncio.shield(job)

    def close(self) -> None:
        """Begin nothing more."""
        self._closing = True
        self._thread.shutdown(wait=False, cancel_futures=True)

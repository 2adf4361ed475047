"""The threads that listen for all sessions."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from gateway.fairness.semaphore import FairSemaphore
from gateway.http.realtime.turns.end import EndDetector
from gateway.http.realtime.turns.stream import Window


class VoicePool:
    """One thread, so that the event loop never waits for the network; sessions take turns by client.

    Attributes:
        end: Hears in a pause whether the speaker has finished; none if silence alone says so.
    """

    def __init__(self, end: EndDetector | None = None) -> None:
        self.end: Final = end
        self._thread = ThreadPoolExecutor(1, "turns")
        self._turn = FairSemaphore(1)

    async def windows(
        self, listen: Callable[[], list[Window]], client: str, spent: Callable[[float], None]
    ) -> list[Window]:
        """Return what is heard.

        Args:
            listen: Returns it; called in the thread.
            client: Whose turn it is.
            spent: Called with the seconds of a core that it took.
        """

        def work() -> tuple[list[Window], float]:
            begun = time.thread_time()
            return listen(), time.thread_time() - begun

        async with self._turn.take(1, client):
            windows, seconds = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        spent(seconds)
        return windows

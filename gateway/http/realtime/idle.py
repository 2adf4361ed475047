"""The time that a user may be silent after an answer."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.http.connection import ClientGoneError

MOST_IN_A_ROW: Final = 3
"""Answers to silence, one after the other: nobody may be there."""
log = logging.getLogger(__name__)


class IdleTimer:
    """At most one wait at a time.  Must be closed."""

    def __init__(self) -> None:
        self._wait: asyncio.Task[None] | None = None
        self._acting: asyncio.Task[None] | None = None
        self._in_a_row = 0

    def start(self, played: float, idle_s: float, act: Callable[[], Awaitable[None]]) -> None:
        """Act ``idle_s`` seconds after the monotonic time at which an answer has been played."""
        self.stop()
        if self._in_a_row < MOST_IN_A_ROW:
            delay = max(0.0, played - time.monotonic()) + idle_s
            self._wait = asyncio.create_task(self._act_after(delay, act))

    def stop(self) -> None:
        """Wait no more."""
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None

    def spoken(self) -> None:
        """The user is there."""
        self._in_a_row = 0
        self.stop()

    async def close(self) -> None:
        """Wait no more, and stop acting."""
        self.stop()
        if self._acting is not None:
            self._acting.cancel()
            await asyncio.gather(self._acting, return_exceptions=True)

    async def _act_after(self, delay: float, act: Callable[[], Awaitable[None]]) -> None:
        await asyncio.sleep(delay)
        # What it does from here on stops the wait, not itself.
        self._acting, self._wait = self._wait, None
        self._in_a_row += 1
        try:
            await act()
        except ClientGoneError:
            log.debug("a realtime client disconnected while it was silent")

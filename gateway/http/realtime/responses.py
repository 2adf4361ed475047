"""The responses of a session: the current one, one begun before its turn had ended, and those to silence."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from gateway.http.connection import ClientGoneError
from gateway.http.realtime.response import CancelReason, Response
from gateway.http.realtime.settings import Settings
from gateway.requests.metrics import TurnEvent
from omnirelay.content import ChatMessage
from omnirelay.errors import NoResponseError

EARLY_PAUSE_S: Final = 0.03
"""A client that sends a recording faster than it was spoken goes on within this time."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Responses:
    """Runs and ends the responses of one session, one at a time.  Must be closed.

    Attributes:
        current: The last response, unless it was interrupted.
        _count: Counts what became of a turn, by its name in the metrics.
        _on_end: Called with each response after its last event.
        _early: A response that the client does not know of.
    """

    _count: Callable[[TurnEvent], None]
    _on_end: Callable[[Response], None]
    current: Response | None = None
    _early: Response | None = None
    _running: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether a response is being generated."""
        return self._running is not None and not self._running.done()

    @property
    def has_early(self) -> bool:
        """Whether a response that the client does not know of has begun."""
        return self._early is not None

    def start(self, response: Response) -> None:
        """Run a response; the one before must have ended."""
        self.current = response
        self._running = asyncio.create_task(self._run(response))

    def start_early(self, response: Response) -> None:
        """Begin to answer a turn as it is, in case the user's pause is its end."""
        self.drop_early()
        self._early = response
        response.begin(EARLY_PAUSE_S)

    def take_early(self, settings: Settings, messages: list[ChatMessage]) -> Response | None:
        """Take the response that was begun early, if it answers this."""
        early = self._early
        if early is None or not early.same(settings, messages):
            return None
        self._early = None
        if early.begun:
            self._count("answered_early")
        return early

    def drop_early(self) -> None:
        """Drop the response that was begun early, if any."""
        dropped, self._early = self._early, None
        if dropped is not None:
            if dropped.begun:
                self._count("dropped_early")
            dropped.drop()

    async def cancel(self, response_id: str | None) -> None:
        """Cancel the response with this id, or the one that is generated.

        Raises:
            NoResponseError: It is not being generated.
        """
        response = self.current
        if not self.running or response is None or response_id not in (None, response.id):
            raise NoResponseError("Cancellation failed: no such response is generated")
        await self.interrupt()

    async def interrupt(self, reason: CancelReason = "client_cancelled") -> None:
        """Cancel the current response, if any, and wait for its last event."""
        if self.current is not None and self._running is not None:
            self.current.cancel(reason)
            await asyncio.wait({self._running})
            self.current = None

    async def ended(self) -> None:
        """Wait until no response is generated."""
        while self._running is not None and self.running:
            await asyncio.wait({self._running})

    async def close(self) -> None:
        """End all."""
        self.drop_early()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, response: Response) -> None:
        try:
            await response.run()
        except ClientGoneError:
            log.debug("the client of %s disconnected", response.id)
        self._on_end(response)


MOST_IN_A_ROW: Final = 3
"""Answers to silence, one after the other: nobody may be there."""


class IdleTimer:
    """At most one wait at a time.  Must be closed."""

    def __init__(self) -> None:
        self._wait: asyncio.TimerHandle | None = None
        self._acting: asyncio.Task[None] | None = None
        self._in_a_row = 0

    def start(self, played: float, idle_s: float, act: Callable[[], Awaitable[None]]) -> None:
        """Act ``idle_s`` seconds after the monotonic time at which an answer has been played."""
        self.stop()
        if self._in_a_row < MOST_IN_A_ROW:
            delay = max(0.0, played - time.monotonic()) + idle_s
            self._wait = asyncio.get_running_loop().call_later(delay, self._begin, act)

    def stop(self) -> None:
        """Wait no more."""
        if self._wait is not None:
            self._wait.cancel()

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

    def _begin(self, act: Callable[[], Awaitable[None]]) -> None:
        self._in_a_row += 1
        self._acting = asyncio.create_task(self._act(act))

    async def _act(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            await act()
        except ClientGoneError:
            log.debug("a realtime client disconnected while it was silent")

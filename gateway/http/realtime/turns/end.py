"""The thread that hears for all sessions whether a speaker has finished."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gateway.fairness.thread import FairThread
from gateway.http.realtime.turns.silero import Floats
from gateway.http.realtime.turns.smart_turn import SECONDS
from gateway.http.realtime.turns.stream import WINDOW_BYTES, WINDOW_MS, Resampler, floats
from gateway.requests.metrics import EndVerdict
from shared.log import limited

HEARD_BYTES: Final = 1000 * SECONDS // WINDOW_MS * WINDOW_BYTES
"""Most audio that is heard: the end of the turn."""
LATE_S: Final = 0.4
"""A verdict that takes longer is not waited for: a silence ends the turn soon."""
MAX_WAITING: Final = 16
"""Pauses that wait for a verdict; a further one does without."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class EndDetector:
    """One thread; sessions take turns by client.

    Attributes:
        _network: As :meth:`SmartTurn.finished`; takes some ten milliseconds.
        _heard: Called with each verdict.
        _spent: Called with the seconds of a core that one took.
    """

    _network: Callable[[Floats], float]
    _heard: Callable[[EndVerdict], None]
    _spent: Callable[[float], None]
    _thread: FairThread = field(default_factory=lambda: FairThread("end-of-turn"))
    _works: set[asyncio.Task[float]] = field(default_factory=set)

    async def finished(self, pcm: bytes, client: str) -> float | None:
        """Return how probable it is that the speaker has finished; none if that takes too long or fails.

        Args:
            pcm: The end of the turn in whole windows, at most :data:`HEARD_BYTES`: int16, mono, 24 kHz.
            client: Whose turn it is.
        """
        if len(self._works) >= MAX_WAITING:
            self._heard("busy")
            return None
        work = asyncio.create_task(self._work(pcm, client))
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        await asyncio.wait({work}, timeout=LATE_S)
        if not work.done():
            work.cancel()
            self._heard("late")
            limited(log).warning("the end of a turn was not heard in %.1f s: silence ends it", LATE_S)
            return None
        if (error := work.exception()) is not None:
            self._heard("failed")
            limited(log).error("the end of a turn could not be heard: silence ends it", exc_info=error)
            return None
        self._heard("finished" if work.result() >= 0.5 else "unfinished")
        return work.result()

    async def _work(self, pcm: bytes, client: str) -> float:
        probability, seconds = await self._thread.timed(
            client, lambda: self._network(Resampler().resampled(floats(pcm)))
        )
        self._spent(seconds)
        return probability

"""Aborts that a stage has not confirmed are sent again."""

import time
from collections.abc import Callable
from typing import Final

from shared.messages import STAGES, StageName

RESEND_AFTER_S: Final = 2.0
MAX_OPEN: Final = 10_000
"""Unconfirmed aborts kept for a stage; the oldest is given up for one more."""


class AbortLedger:
    """Which stages have not yet confirmed which aborts.

    Args:
        send: Sends an abort of a request to a stage; one that gets lost is sent again later.
        clock: Gives monotonic seconds.
    """

    def __init__(
        self, send: Callable[[StageName, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._clock = clock
        self._open: dict[StageName, dict[str, float]] = {stage: {} for stage in STAGES}

    def abort(self, request_id: str) -> None:
        """Tell all stages to drop a request."""
        for stage in STAGES:
            waiting = self._open[stage]
            if len(waiting) >= MAX_OPEN:
                del waiting[next(iter(waiting))]
            waiting[request_id] = self._clock()
            self._send(stage, request_id)

    def confirmed(self, stage: StageName, request_id: str) -> None:
        """A stage holds nothing of the request any more."""
        self._open[stage].pop(request_id, None)

    def resend(self, stage: StageName, at_once: bool = False) -> None:
        """The stage is alive: repeat what it has not confirmed.

        Args:
            stage: Which.
            at_once: Also what was sent less than :data:`RESEND_AFTER_S` ago.  A process that takes a stage's
                place holds none of the old requests, but what others kept for it may bring them back.
        """
        now = self._clock()
        for request_id, sent in self._open[stage].items():
            if at_once or now - sent > RESEND_AFTER_S:
                self._open[stage][request_id] = now
                self._send(stage, request_id)

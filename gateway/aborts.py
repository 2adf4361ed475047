"""Aborts that a replica has not confirmed are sent again."""

import time
from collections.abc import Callable
from typing import Final

from shared.messages import StageName

RESEND_AFTER_S: Final = 0.4
MAX_OPEN: Final = 10_000
"""Unconfirmed aborts kept for a replica; the oldest is given up for one more."""


class AbortLedger:
    """Which replicas have not yet confirmed which aborts.

    Args:
        send: Sends an abort of a request to a replica; one that gets lost is sent again later.
        clock: Gives monotonic seconds.
    """

    def __init__(
        self, send: Callable[[StageName, str, str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._clock = clock
        self._open: dict[tuple[StageName, str], dict[str, float]] = {}

    def abort(self, stage: StageName, replica: str, request_id: str) -> None:
        """Tell a replica to drop a request."""
        waiting = self._open.setdefault((stage, replica), {})
        if len(waiting) >= MAX_OPEN:
            del waiting[next(iter(waiting))]
        waiting[request_id] = self._clock()
        self._send(stage, replica, request_id)

    def confirmed(self, stage: StageName, replica: str, request_id: str) -> None:
        """A replica holds nothing of the request any more."""
        waiting = self._open.get((stage, replica), {})
        waiting.pop(request_id, None)
        if not waiting:
            self._open.pop((stage, replica), None)

    def resend(self, stage: StageName, replica: str) -> None:
        """The replica is alive: repeat what it has not confirmed."""
        now = self._clock()
        waiting = self._open.get((stage, replica), {})
        for request_id, sent in waiting.items():
            if now - sent > RESEND_AFTER_S:
                waiting[request_id] = now
                self._send(stage, replica, request_id)

    def forget(self, stage: StageName, replica: str) -> None:
        """The replica is gone for good, and all that it held."""
        self._open.pop((stage, replica), None)

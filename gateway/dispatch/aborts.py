"""Aborts that a replica has not confirmed are sent again."""

import logging
import time
from collections.abc import Callable, Collection
from typing import Final

from shared.log import of_request
from shared.messages import StageName

RESEND_AFTER_S: Final = 0.4
MAX_OPEN: Final = 10_000
"""Unconfirmed aborts kept for a replica; the oldest is given up for one more."""

log = logging.getLogger(__name__)

Holder = tuple[StageName, str]
"""A replica that may hold something of a request: its stage and its name."""


class AbortLedger:
    """Which replicas have not yet confirmed which aborts.

    Args:
        send: Sends an abort of a request to a replica; one that gets lost is sent again later.
        observe: Told in how many seconds all replicas have dropped a request; not of one that a replica took
            along when it ended.
        clock: Gives monotonic seconds.
    """

    def __init__(
        self,
        send: Callable[[StageName, str, str], None],
        observe: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send = send
        self._observe = observe
        self._clock = clock
        # What each replica has not confirmed, with the time when it was told last.
        self._open: dict[Holder, dict[str, float]] = {}
        # When a request was aborted, and how many replicas have not confirmed it.
        self._unconfirmed: dict[str, tuple[float, int]] = {}

    def abort(self, request_id: str, holders: Collection[Holder]) -> None:
        """Tell replicas to drop a request."""
        now = self._clock()
        self._unconfirmed[request_id] = now, len(holders)
        for holder in holders:
            waiting = self._open.setdefault(holder, {})
            if len(waiting) >= MAX_OPEN:
                self._unconfirmed.pop(oldest := next(iter(waiting)), None)
                del waiting[oldest]
            waiting[request_id] = now
            self._send(*holder, request_id)

    def confirmed(self, stage: StageName, replica: str, request_id: str) -> None:
        """A replica holds nothing of the request any more."""
        waiting = self._open.get((stage, replica), {})
        if waiting.pop(request_id, None) is None:
            return
        if not waiting:
            del self._open[stage, replica]
        began, missing = self._unconfirmed.pop(request_id, (0.0, 0))
        if missing > 1:
            self._unconfirmed[request_id] = began, missing - 1
        elif missing:
            seconds = self._clock() - began
            about = of_request(request_id)
            log.debug(
                "request %s was dropped by all its stages after %.4f s", request_id, seconds, extra=about
            )
            self._observe(seconds)

    def resend(self, stage: StageName, replica: str) -> None:
        """The replica is alive: repeat what it has not confirmed."""
        now = self._clock()
        waiting = self._open.get((stage, replica), {})
        for request_id, sent in waiting.items():
            if now - sent > RESEND_AFTER_S:
                waiting[request_id] = now
                self._send(stage, replica, request_id)

    def unconfirmed(self, stage: StageName, replica: str) -> list[str]:
        """What a replica may still have in work although it was told to drop it."""
        return list(self._open.get((stage, replica), {}))

    def keep(self, known: Callable[[StageName, str], object | None]) -> None:
        """Forget the replicas that are not known any more, whatever the way they went."""
        for holder in [holder for holder in self._open if known(*holder) is None]:
            self.forget(*holder)

    def forget(self, stage: StageName, replica: str) -> None:
        """The replica is gone for good, and all that it held."""
        for request_id in self._open.pop((stage, replica), {}):
            self._unconfirmed.pop(request_id, None)

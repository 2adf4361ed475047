"""Aborts are repeated until each replica has confirmed them."""

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from shared.log import of_request
from shared.messages import Abort, StageName

RESEND_AFTER_S: Final = 0.4
MAX_OPEN: Final = 10_000
"""Unconfirmed aborts kept per replica; the oldest is dropped beyond this."""

log = logging.getLogger(__name__)

Holder = tuple[StageName, str]
"""Stage and name of a replica."""


@dataclass(eq=False)
class AbortLedger:
    """Unconfirmed aborts by replica; observes the seconds until all replicas had confirmed one."""

    _send: Callable[[StageName, str, Abort], None]
    _observe: Callable[[float], None]
    _clock: Callable[[], float] = time.monotonic
    # By replica: unconfirmed attempts, and when the abort was last sent.
    _open: dict[Holder, dict[str, float]] = field(default_factory=dict)
    # By attempt: when it was aborted, and how many replicas have not confirmed.
    _unconfirmed: dict[str, tuple[float, int]] = field(default_factory=dict)

    def abort(self, request_id: str, holders: Collection[Holder]) -> None:
        """Abort an attempt at its replicas."""
        now = self._clock()
        self._unconfirmed[request_id] = now, len(holders)
        for holder in holders:
            waiting = self._open.setdefault(holder, {})
            if len(waiting) >= MAX_OPEN:
                self._unconfirmed.pop(oldest := next(iter(waiting)), None)
                del waiting[oldest]
            waiting[request_id] = now
            self._send(*holder, Abort(request_id=request_id))

    def confirmed(self, stage: StageName, replica: str, request_id: str) -> None:
        """A replica has dropped the attempt."""
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
            dropped = "request %s was dropped by all its stages after %.4f s"
            log.debug(dropped, request_id, seconds, extra=of_request(request_id))
            self._observe(seconds)

    def resend(self, stage: StageName, replica: str) -> None:
        """Repeat unconfirmed aborts to a replica that is alive."""
        now = self._clock()
        waiting = self._open.get((stage, replica), {})
        for request_id, sent in waiting.items():
            if now - sent > RESEND_AFTER_S:
                waiting[request_id] = now
                self._send(stage, replica, Abort(request_id=request_id))

    def unconfirmed(self, stage: StageName, replica: str) -> list[str]:
        """Attempts that a replica may still be working on."""
        return list(self._open.get((stage, replica), {}))

    def keep(self, known: Callable[[StageName, str], object | None]) -> None:
        """Forget replicas that are no longer known."""
        for holder in [holder for holder in self._open if known(*holder) is None]:
            self.forget(*holder)

    def forget(self, stage: StageName, replica: str) -> None:
        """Forget a replica that is lost for good."""
        for request_id in self._open.pop((stage, replica), {}):
            self._unconfirmed.pop(request_id, None)

"""A bound for lines that others can cause as often as they like."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

BURST: Final = 10
"""Lines of a kind that are written in an interval; more are counted."""
INTERVAL_S: Final = 10.0
MAX_KINDS: Final = 256
"""Kinds that are told apart at once; what is more counts as one kind."""
T = TypeVar("T")


class _Kind(Generic[T]):
    """What came of one kind in this interval."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.written = 0
        self.held = 0
        self.last: T | None = None


class Repeats(Generic[T]):
    """Lets the first few of a kind through in an interval, and counts the others.

    Args:
        clock: Gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._kinds: dict[Hashable, _Kind[T]] = {}

    def admit(self, kind: Hashable, item: T, burst: int = BURST) -> bool:
        """Whether one more of a kind is to be written."""
        with self._lock:
            known = self._kinds.get(kind)
            if known is None:
                if len(self._kinds) >= MAX_KINDS:
                    kind = None
                known = self._kinds.setdefault(kind, _Kind(self._clock()))
            if known.written < burst:
                known.written += 1
                return True
            known.held += 1
            known.last = item
            return False

    def ended(self, at_once: bool = False) -> list[tuple[T, int]]:
        """Close the intervals that are over; gives the last of each kind that was held back, and how many.

        Args:
            at_once: Close all intervals.
        """
        began = self._clock() - INTERVAL_S
        with self._lock:
            over = {kind: each for kind, each in self._kinds.items() if at_once or each.since <= began}
            for kind in over:
                del self._kinds[kind]
        return [(each.last, each.held) for each in over.values() if each.last is not None]

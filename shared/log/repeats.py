"""A rate limit for log lines that others can cause."""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

BURST: Final = 10
"""Lines of a kind that are written per interval; more are counted."""
INTERVAL_S: Final = 10.0
MAX_KINDS: Final = 256
"""Kinds that are tracked at once; all others count as one."""
T = TypeVar("T")


@dataclass
class _Kind(Generic[T]):
    """The lines of one kind in this interval."""

    since: float
    written: int = 0
    held: int = 0
    last: T | None = None


class Repeats(Generic[T]):
    """Admits the first few lines of each kind in an interval, and counts the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._kinds: dict[Hashable, _Kind[T]] = {}

    def admit(self, kind: Hashable, item: T, burst: int = BURST) -> bool:
        """Whether one more line of a kind is to be written."""
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
        """Close past intervals, or all; gives the last suppressed line of each kind, and their number."""
        began = self._clock() - INTERVAL_S
        with self._lock:
            over = {kind: each for kind, each in self._kinds.items() if at_once or each.since <= began}
            for kind in over:
                del self._kinds[kind]
        return [(each.last, each.held) for each in over.values() if each.last is not None]

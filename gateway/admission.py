"""Who may be at the stages, who waits, and who is told to come back later."""

import heapq
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final

from shared.errors import BusyError

MIN_RETRY_MS: Final = 100
MAX_RETRY_MS: Final = 60_000
FIRST_GUESS_S: Final = 1.0
"""How long a request takes, before any has been seen."""
WEIGHT_OF_NEWEST: Final = 0.2


class Admission:
    """A bounded number of places at the stages and a bounded line in front of them.

    The line is served by priority (smaller first), then in order of arrival.

    Args:
        max_active: Places at the stages.
        max_queued: Places in the line.
    """

    def __init__(self, max_active: int, max_queued: int) -> None:
        self._max_active = max_active
        self._max_queued = max_queued
        self._active: set[str] = set()
        self._queued: set[str] = set()
        self._preparing = 0
        self._line: list[tuple[int, int, str]] = []
        self._arrival = count()
        self._mean_s = FIRST_GUESS_S

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Keep a place for a request while its prompt is made; :meth:`enter` right after finds it free.

        Raises:
            BusyError: The line is full.
        """
        self._require_place()
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    def enter(self, request_id: str, priority: int) -> None:
        """Stand in line; :meth:`next` says whose turn it is.

        Raises:
            BusyError: The line is full.
        """
        self._require_place()
        self._queued.add(request_id)
        heapq.heappush(self._line, (priority, next(self._arrival), request_id))

    def next(self) -> str | None:
        """Say whose turn it is, if a place at the stages is free and one waits."""
        if len(self._active) >= self._max_active:
            return None
        while self._line and self._line[0][2] not in self._queued:
            heapq.heappop(self._line)
        return self._line[0][2] if self._line else None

    def start(self, request_id: str) -> None:
        """Give the one whose turn it is its place at the stages."""
        self._queued.remove(request_id)
        self._active.add(request_id)

    def leave(self, request_id: str, served_s: float | None = None) -> None:
        """Free the place of a request, at the stages or in the line.

        Args:
            request_id: Which.
            served_s: How long it was at the stages, if it was completed there.
        """
        self._active.discard(request_id)
        self._queued.discard(request_id)
        if len(self._line) > 2 * len(self._queued) + 16:
            self._line = [entry for entry in self._line if entry[2] in self._queued]
            heapq.heapify(self._line)
        if served_s is not None:
            self._mean_s += WEIGHT_OF_NEWEST * (served_s - self._mean_s)

    def retry_after_ms(self) -> int:
        """Milliseconds until a place in the line is likely to be free."""
        return round(min(max(1000 * self._mean_s / self._max_active, MIN_RETRY_MS), MAX_RETRY_MS))

    def _require_place(self) -> None:
        waiting = self._preparing + len(self._queued)
        if len(self._active) + waiting >= self._max_active + self._max_queued:
            raise BusyError(
                f"{len(self._active)} requests are being served and {waiting} wait, "
                "no more are taken: try again later",
                self.retry_after_ms(),
            )

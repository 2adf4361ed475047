"""Admission control: a bounded queue in front of a bounded number of places at the stages."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from gateway.fairness.fair_queue import FairQueue
from gateway.fairness.quota import Quota
from omnirelay.errors import BusyError

MIN_RETRY_MS: Final = 100
MAX_RETRY_MS: Final = 60_000
FIRST_GUESS_S: Final = 1.0
"""Assumed service time before one was measured."""
WEIGHT_OF_NEWEST: Final = 0.2
TIMES_FREE: Final = 16
"""A client that holds so many times the free places gets no more; alone it may fill most of a short queue."""
TIMES_FREE_ACTIVE: Final = 7
"""The same for places at the stages: of eight or more, a client alone gets at most seven eighths."""
FEW: Final = 16
"""Places before the stages have said how many requests they compute at once."""
OLDEST_EVERY: Final = 8
"""Of so many starts one is of the priority of the oldest request that may start: nothing waits for ever."""


@dataclass
class _Entry:
    """A request, and the places at the stages that it has."""

    client: str
    priority: int
    speaks: bool
    places: list[Quota] = field(default_factory=list)


class Admission:
    """Serves by priority (smaller first); within one, clients take turns, each in order of arrival.

    There are ``max_active`` places at the thinker, and as many for speech, at first :data:`FEW` by default.
    A request with speech needs one of each; it leaves the thinker's when its text is complete, so that
    speech does not keep text waiting.
    """

    def __init__(self, max_active: int | None, max_queued: int) -> None:
        self._follows = max_active is None
        max_active = max_active or FEW
        self._max_queued = max_queued
        self._places = Quota(max_active + max_queued, TIMES_FREE)
        self._thinking = Quota(max_active, TIMES_FREE_ACTIVE)
        self._speaking = Quota(max_active, TIMES_FREE_ACTIVE)
        self._entries: dict[str, _Entry] = {}
        self._queued: dict[str, _Entry] = {}
        """In order of arrival."""
        self._queues: dict[int, FairQueue] = {}
        self._starts = 0
        self._mean_s = FIRST_GUESS_S

    def follow(self, thinking: int, speaking: int) -> None:
        """Have as many places as the stages compute requests at once, unless configured; 0: as before.

        While there are more requests than places, none starts.
        """
        if self._follows:
            self._thinking.total = thinking or self._thinking.total
            self._speaking.total = speaking or self._speaking.total
            self._places.total = self._thinking.total + self._max_queued

    @contextmanager
    def preparing(self, client: str = "") -> Iterator[None]:
        """Reserve a place, which :meth:`enter` right after finds free; BusyError if the client gets none."""
        self._require_place()
        if not self._places.has_for(client):
            raise BusyError(
                f"this client holds {self._places.own(client)} of {self._places.total} places, "
                "the rest is reserved for others: try again later",
                self.retry_after_ms(),
            )
        self._places.take(client)
        try:
            yield
        finally:
            self._places.give(client)

    def enter(self, request_id: str, priority: int, client: str = "", speaks: bool = False) -> None:
        """Append a request to the queue; BusyError if it is full."""
        self._require_place()
        self._places.take(client)
        self._entries[request_id] = self._queued[request_id] = _Entry(client, priority, speaks)
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = FairQueue(self._is_served)
        queue.join(request_id, client)

    def next(self, speech: bool = True) -> str | None:
        """The request to dispatch next, if there is one that finds its places free.

        Args:
            speech: Consider requests with speech too.
        """
        if not self._thinking.free:
            return None
        may = partial(self._may, speech)
        priorities = sorted(self._queues)
        if self._starts % OLDEST_EVERY == OLDEST_EVERY - 1:
            able = (each.priority for name, each in self._queued.items() if may(each.client, name))
            priorities = [*itertools.islice(able, 1), *priorities]
        for priority in priorities:
            first = self._queues[priority].first(may)
            if first is not None:
                return first[1]
        return None

    @property
    def has_queued(self) -> bool:
        """Some request waits."""
        return bool(self._queued)

    @property
    def has_room(self) -> bool:
        """No request waits, and the next one finds a place at the thinker even if another comes first."""
        return not self._queued and self._thinking.free > 1

    def start(self, request_id: str) -> None:
        """Move the next request from the queue to the stages."""
        entry = self._queued.pop(request_id)
        self._starts += 1
        self._queues[entry.priority].serve(entry.client, request_id)
        self._drop_if_empty(entry.priority)
        entry.places = [self._thinking, self._speaking] if entry.speaks else [self._thinking]
        for each in entry.places:
            each.take(entry.client)

    def leave_thinker(self, request_id: str) -> bool:
        """Free a request's place at the thinker; return whether it had one."""
        entry = self._entries.get(request_id)
        if entry is None or self._thinking not in entry.places:
            return False
        entry.places.remove(self._thinking)
        self._thinking.give(entry.client)
        return True

    def leave(self, request_id: str, served_s: float | None = None) -> None:
        """Free a request's places; ``served_s`` is its time at the stages, if it completed."""
        if served_s is not None:
            self._mean_s += WEIGHT_OF_NEWEST * (served_s - self._mean_s)
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._places.give(entry.client)
        for each in entry.places:
            each.give(entry.client)
        if self._queued.pop(request_id, None) is not None:
            self._queues[entry.priority].leave(request_id, entry.client)
            self._drop_if_empty(entry.priority)

    def _is_served(self, client: str) -> bool:
        return self._thinking.own(client) + self._speaking.own(client) > 0

    def _may(self, speech: bool, client: str, request_id: str) -> bool:
        may_speak = speech and self._speaking.has_for(client)
        return self._thinking.has_for(client) and (may_speak or not self._queued[request_id].speaks)

    def retry_after_ms(self) -> int:
        """Expected time until a place is free."""
        return round(min(max(1000 * self._mean_s / self._thinking.total, MIN_RETRY_MS), MAX_RETRY_MS))

    def _drop_if_empty(self, priority: int) -> None:
        if not self._queues[priority]:
            del self._queues[priority]

    def _require_place(self) -> None:
        if not self._places.free:
            waiting = len(self._queued)
            raise BusyError(
                f"{self._places.used - waiting} requests are being served and {waiting} wait, "
                "no more are taken: try again later",
                self.retry_after_ms(),
            )

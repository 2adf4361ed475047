"""Admission control: a bounded queue in front of a bounded number of places at the stages."""

from collections.abc import Iterator
from contextlib import contextmanager
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


class Admission:
    """Serves by priority (smaller first); within one, clients take turns, each in order of arrival."""

    def __init__(self, max_active: int, max_queued: int) -> None:
        self._places = Quota(max_active + max_queued, TIMES_FREE)
        self._clients: dict[str, str] = {}
        self._queued: dict[str, int] = {}
        """Priority by request."""
        self._active = Quota(max_active)
        self._queues: dict[int, FairQueue] = {}
        self._mean_s = FIRST_GUESS_S

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

    def enter(self, request_id: str, priority: int, client: str = "") -> None:
        """Append a request to the queue; BusyError if it is full."""
        self._require_place()
        self._places.take(client)
        self._clients[request_id] = client
        self._queued[request_id] = priority
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = FairQueue(lambda name: self._active.own(name) > 0)
        queue.join(request_id, client)

    def next(self) -> str | None:
        """The request to dispatch next, if there is one and a place at the stages is free."""
        if not self._active.free or not self._queues:
            return None
        first = self._queues[min(self._queues)].first()
        return first[1] if first is not None else None

    @property
    def has_queued(self) -> bool:
        """Some request waits."""
        return bool(self._queued)

    @property
    def has_room(self) -> bool:
        """No request waits, and the next one finds a place at the stages even if another comes first."""
        return not self._queued and self._active.free > 1

    def start(self, request_id: str) -> None:
        """Move the next request from the queue to the stages."""
        priority = self._queued.pop(request_id)
        client = self._clients[request_id]
        self._queues[priority].serve(client)
        self._active.take(client)
        self._drop_if_empty(priority)

    def leave(self, request_id: str, served_s: float | None = None) -> None:
        """Free a request's place; ``served_s`` is its time at the stages, if it completed."""
        if served_s is not None:
            self._mean_s += WEIGHT_OF_NEWEST * (served_s - self._mean_s)
        client = self._clients.pop(request_id, None)
        if client is None:
            return
        self._places.give(client)
        priority = self._queued.pop(request_id, None)
        if priority is None:
            self._active.give(client)
            return
        self._queues[priority].leave(request_id, client)
        self._drop_if_empty(priority)

    def retry_after_ms(self) -> int:
        """Expected time until a place is free."""
        return round(min(max(1000 * self._mean_s / self._active.total, MIN_RETRY_MS), MAX_RETRY_MS))

    def _drop_if_empty(self, priority: int) -> None:
        if not self._queues[priority]:
            del self._queues[priority]

    def _require_place(self) -> None:
        if not self._places.free:
            waiting = self._places.used - self._active.used
            raise BusyError(
                f"{self._active.used} requests are being served and {waiting} wait, "
                "no more are taken: try again later",
                self.retry_after_ms(),
            )

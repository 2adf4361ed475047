"""Requests that may be why an engine died: each is tried apart from the others, one at a time."""

from collections.abc import Iterable
from typing import Final, Literal

from gateway.requests.active import ActiveRequest, Suspicion
from shared.messages import StageName

Death = Literal["engine failed", "unexplained"]
WEIGHT: Final[dict[Death, int]] = {"engine failed": 2, "unexplained": 1}
"""How much the death of a replica counts against the requests that were there; from
:data:`gateway.requests.active.APART` on a request is tried apart.

A stage whose engine raises says so.  Of any other end nobody knows the reason: it may have been a request,
the kernel, or an operator with ``kill -9``; so it takes two of these.
"""


class Suspects:
    """The requests that are to be tried apart, in the order in which they are."""

    def __init__(self) -> None:
        self._order: dict[str, ActiveRequest] = {}

    @property
    def first(self) -> ActiveRequest | None:
        """The one whose turn it is, until it is cleared or has ended; none if there are no suspects."""
        for active in list(self._order.values()):
            if active.apart:
                return active
            del self._order[active.record.request_id]
        return None

    def __contains__(self, active: ActiveRequest) -> bool:
        return active.record.request_id in self._order and bool(active.apart)

    def add_death(self, active: ActiveRequest, stage: StageName, replica: str, death: Death) -> bool:
        """Count a replica that died while it had work on a request.

        Returns:
            True if the request ran apart there: it is the reason.
        """
        if not active.record.computes(stage):
            return False
        progress = active.record.progress
        suspicion = active.suspicions.setdefault(stage, Suspicion(progress))
        weight = WEIGHT[death]
        if suspicion.deaths.get(replica, 0) >= weight:
            # Told in two ways, as by its silence and by its successor.
            return False
        was_apart = suspicion.serious and suspicion.tried_on == replica
        suspicion.deaths[replica] = weight
        suspicion.progress = progress
        if suspicion.serious:
            self._order[active.record.request_id] = active
        return was_apart

    def remove_death(self, requests: Iterable[ActiveRequest], stage: StageName, replica: str) -> None:
        """Count a replica no more that was taken for dead and lives."""
        for active in requests:
            if stage in active.suspicions:
                active.suspicions[stage].deaths.pop(replica, None)

    def clear(self, active: ActiveRequest) -> set[StageName]:
        """Drop the suspicions that a request's progress has disproved.

        Returns:
            The stages at which it was tried apart and need not be any more.
        """
        past = {
            stage: suspicion
            for stage, suspicion in active.suspicions.items()
            if active.record.is_past(stage, suspicion.progress)
        }
        for stage in past:
            del active.suspicions[stage]
        if not active.apart:
            self._order.pop(active.record.request_id, None)
        return {stage for stage, suspicion in past.items() if suspicion.serious}

    def forget(self, active: ActiveRequest) -> None:
        """A request has ended."""
        self._order.pop(active.record.request_id, None)

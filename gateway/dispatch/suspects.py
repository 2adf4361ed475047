"""Requests that may end engines: each is isolated in turn."""

from typing import Final, Literal

from gateway.requests.active import ActiveRequest, Suspicion
from shared.messages import StageName

Death = Literal["engine failed", "unexplained"]
WEIGHT: Final[dict[Death, int]] = {"engine failed": 2, "unexplained": 1}
"""Of a death against the replica's requests, toward :data:`gateway.requests.active.APART`: one that no stage
reports may be the kernel's or an operator's doing, so it takes two of them.
"""


class Suspects:
    """Requests to isolate, in order."""

    def __init__(self) -> None:
        self._order: dict[str, ActiveRequest] = {}

    @property
    def first(self) -> ActiveRequest | None:
        """The one whose turn it is, until it is cleared or ends."""
        for active in list(self._order.values()):
            if active.apart:
                return active
            del self._order[active.record.request_id]
        return None

    def __contains__(self, active: ActiveRequest) -> bool:
        return active.record.request_id in self._order and bool(active.apart)

    def add_death(self, active: ActiveRequest, stage: StageName, replica: str, death: Death) -> bool:
        """Count the death of a replica that worked on a request; true if that was alone there: the cause."""
        if not active.record.computes(stage):
            return False
        progress = active.record.progress
        suspicion = active.suspicions.setdefault(stage, Suspicion(progress))
        weight = WEIGHT[death]
        if suspicion.deaths.get(replica, 0) >= weight:
            # The same death, detected in two ways.
            return False
        was_apart = suspicion.serious and suspicion.tried_on == replica
        suspicion.deaths[replica] = weight
        suspicion.progress = progress
        if suspicion.serious:
            self._order[active.record.request_id] = active
        return was_apart

    def clear(self, active: ActiveRequest) -> set[StageName]:
        """Remove disproved suspicions; return the stages at which it need not be isolated any more."""
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
        """Remove a request that has ended."""
        self._order.pop(active.record.request_id, None)

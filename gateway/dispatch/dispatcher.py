"""Places requests on replicas, retries lost attempts, and isolates requests that may end engines."""

import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final

import msgspec

from gateway.dispatch.aborts import AbortLedger
from gateway.dispatch.placement import place
from gateway.dispatch.registry import Replica, StageRegistry
from gateway.dispatch.stage_errors import from_stage
from gateway.dispatch.stage_transport import StageTransport
from gateway.dispatch.suspects import Death, Suspects
from gateway.requests.active import ActiveRequest, Attempt
from gateway.requests.lifecycle import Reason
from gateway.requests.metrics import GatewayMetrics
from omnirelay.errors import (
    BusyError,
    EngineFailedError,
    OmniRelayError,
    PoisonRequestError,
    QueueFullError,
    StageFailedError,
    StageReservedError,
    StageUnavailableError,
)
from shared.config import GatewayConfig
from shared.log import of_request
from shared.messages import STAGES, Abort, Begin, Cleared, RequestFailed, StageName

PAUSE_S: Final = 0.5
"""Delay before a retry after a failure: a stage whose engine failed reports it before it ends."""
RESERVED_PAUSE_S: Final = 0.5
"""Delay before a request asks again for a replica that another gateway's request has alone."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Dispatcher:
    """The attempts of all requests; ``resumes`` counts retries.

    Attributes:
        _on_failed: Called with a request that cannot be served and the reason, after it was removed here.
        _waiting: Admitted requests without a replica.
    """

    _config: GatewayConfig
    _registry: StageRegistry
    _metrics: GatewayMetrics
    _stages: StageTransport
    _on_failed: Callable[[ActiveRequest, OmniRelayError], None]
    _clock: Callable[[], float] = time.monotonic
    resumes: int = 0
    _suspects: Suspects = field(default_factory=Suspects)
    _attempts: dict[str, ActiveRequest] = field(default_factory=dict)
    _waiting: dict[str, ActiveRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.aborts = AbortLedger(self._stages.tell, self._metrics.abort.observe, self._clock)

    def of(self, attempt_id: str) -> ActiveRequest | None:
        """The request whose current attempt this is."""
        return self._attempts.get(attempt_id)

    def begin(self, active: ActiveRequest) -> bool:
        """Place a request, or let it wait for a missing stage; false if it stays queued for want of room."""
        if self._try(active):
            return True
        if self._missing(active) is None:
            return False
        self._waiting[active.record.request_id] = active
        return True

    def begin_waiting(self) -> None:
        """Place requests that wait for a replica, and fail those that have waited too long."""
        most_s = self._config.resume_wait_s
        for active in list(self._waiting.values()):
            if self._clock() >= active.not_before and self._try(active):
                del self._waiting[active.record.request_id]
            elif (stage := self._missing(active)) and self._registry.missing_s(stage) > most_s:
                because = active.trouble or f"the {stage} is {self._registry.state(stage)}"
                problem = f"{because}, and no {stage} came back within {most_s:g} s"
                self._fail(active, StageUnavailableError(problem))

    def end(self, active: ActiveRequest, completed: bool = False) -> None:
        """Remove a request; unless it completed, its attempt is aborted at the stages."""
        self._suspects.forget(active)
        self._waiting.pop(active.record.request_id, None)
        if completed and active.attempt is not None:
            del self._attempts[active.attempt.id]
        else:
            self._abort(active)

    def attempt_failed(self, active: ActiveRequest, failed: RequestFailed) -> None:
        """A stage reported that the attempt failed: retry, or fail the request."""
        stage, error = failed.stage, from_stage(failed)
        if failed.code == EngineFailedError.code:
            if self._suspects.add_death(active, stage, active.replica(stage), "engine failed"):
                self._fail_poison(active, stage)
                return
        elif failed.code == StageReservedError.code:
            self._wait_for_room(active, stage, RESERVED_PAUSE_S)
            return
        elif isinstance(error, BusyError) and self._is_shared(active, stage):
            self._wait_for_room(active, stage, error.retry_after_ms / 1000)
            return
        elif not (
            isinstance(error, StageFailedError | StageUnavailableError)
            # A request that was admitted once is not rejected for lack of room.
            or (active.resumes and isinstance(error, BusyError))
        ):
            self._fail(active, error)
            return
        self.retry(active, stage, "failed", error)

    def retry(self, active: ActiveRequest, stage: StageName, reason: Reason, error: OmniRelayError) -> None:
        """Resume a request whose attempt was lost at a stage; ``error`` ends it if no attempts are left."""
        if active.resumes >= self._config.resume_attempts:
            self._fail(active, error)
            return
        about = of_request(active.record.request_id)
        log.warning("request %s is resumed: %s", active.name, error, extra=about)
        if reason == "failed":
            active.avoid.add((stage, active.replica(stage)))
        active.resumes += 1
        active.trouble = error
        active.not_before = self._clock() + (PAUSE_S if reason == "failed" else 0.0)
        self._requeue(active)
        self.resumes += 1
        self._metrics.resumes.labels(stage, reason).inc()
        if active.trace is not None:
            active.trace.resumed(stage, reason)

    def _is_shared(self, active: ActiveRequest, stage: StageName) -> bool:
        """Whether requests of other gateways take room at the replica that serves a request."""
        replica = self._registry.get(stage, active.replica(stage))
        if replica is None:
            return False
        load = replica.beat.load
        return load.running + load.waiting > len(self.held_by(replica))

    def _wait_for_room(self, active: ActiveRequest, stage: StageName, pause_s: float) -> None:
        """Try again later, until the deadline: others have the stage, so nothing is refused."""
        log.info("request %s waits for room at the %s, which others have", active.name, stage)
        active.avoid.add((stage, active.replica(stage)))
        active.not_before = self._clock() + pause_s
        active.interruptions += 1
        self._requeue(active)

    def progressed(self, active: ActiveRequest) -> None:
        """More of an answer arrived, which may clear a suspect."""
        cleared = self._suspects.clear(active)
        for stage in cleared:
            if active.attempt is not None:
                self._stages.tell(stage, active.replica(stage), Cleared(request_id=active.attempt.id))
        following = self._suspects.first
        if cleared and following is not None and following.apart & cleared:
            # The next suspect must run alone; this request resumes afterwards.
            log.info("request %s is cleared as a suspect and waits for the next one", active.name)
            active.interruptions += 1
            self._requeue(active)
            self.begin_waiting()

    def held_by(self, replica: Replica) -> list[ActiveRequest]:
        """The requests for which a replica still has work."""
        return [
            active
            for active in self._attempts.values()
            if active.replica(replica.stage) == replica.name and active.record.needs(replica.stage)
        ]

    def note_death(self, replica: Replica, death: Death) -> None:
        """A replica died: each request it worked on, or was told to drop, is a suspect."""
        stage, name = replica.stage, replica.name
        there = {attempt_id.partition(".")[0] for attempt_id in self.aborts.unconfirmed(stage, name)}
        there |= {active.record.request_id for active in self.held_by(replica)}
        for active in self._all():
            if active.record.request_id in there and self._suspects.add_death(active, stage, name, death):
                self._fail_poison(active, stage)

    def is_alone(self, stage: StageName, name: str, attempt_id: str) -> None:
        """A replica has nothing but this attempt, and takes nothing else: if it dies, this is the cause."""
        active = self._attempts.get(attempt_id)
        if active is None:
            self._stages.tell(stage, name, Abort(request_id=attempt_id))
            return
        if stage in active.suspicions:
            active.suspicions[stage].tried_on = name
        self._stages.tell(stage, name, Begin(request_id=attempt_id))

    def remove_death(self, stage: StageName, name: str) -> None:
        """A replica that was taken for dead is alive."""
        for active in self._all():
            if stage in active.suspicions:
                active.suspicions[stage].deaths.pop(name, None)

    def _try(self, active: ActiveRequest) -> bool:
        """Start an attempt if there is a route and the thinker's queue has room."""
        first = self._suspects.first
        if active in self._suspects and active is not first:
            return False
        think = active.record.ask(active.resumes + active.interruptions)
        closed = self._closed_to(active, first) if first is not None else frozenset()
        route = place(self._registry, think.speech is not None, active.avoid, closed, active.near)
        if route is None:
            return False
        # No other gateway's request may be there, either, which only the stage knows.
        route = msgspec.structs.replace(route, alone=tuple(sorted(active.apart)))
        try:
            self._stages.think(msgspec.structs.replace(think, route=route))
        except QueueFullError as error:
            log.debug("request %s waits: %s", active.name, error)
            return False
        self._registry.placed(route)
        active.attempt = Attempt(think.request_id, route)
        for suspicion in active.suspicions.values():
            suspicion.tried_on = None
        self._attempts[think.request_id] = active
        active.started()
        return True

    def _closed_to(self, active: ActiveRequest, first: ActiveRequest) -> Set[tuple[StageName, str]]:
        """The replicas that a request may not use, so that the first suspect runs alone."""
        if active is first:
            return {
                (stage, replica.name)
                for stage in first.apart
                for replica in self._registry.ready(stage)
                if self.held_by(replica)
            }
        if first.attempt is not None:
            return {(stage, first.replica(stage)) for stage in first.apart}
        # One replica of each stage is emptied for it.
        free = (
            min(self._registry.ready(stage), key=lambda each: len(self.held_by(each)), default=None)
            for stage in first.apart
        )
        return {(replica.stage, replica.name) for replica in free if replica is not None}

    def _missing(self, active: ActiveRequest) -> StageName | None:
        """The first stage that the request needs and that has no ready replica."""
        needed = STAGES if active.record.speaks else STAGES[:1]
        return next((stage for stage in needed if self._registry.state(stage) != "ready"), None)

    def _fail_poison(self, active: ActiveRequest, stage: StageName) -> None:
        log.error("request %s ended the engine of a %s while alone on it: rejected", active.name, stage)
        problem = (
            f"the {stage}'s engine ended while it worked on this request, "
            "and again while it worked on nothing else: it is not retried"
        )
        self._fail(active, PoisonRequestError(problem))

    def _fail(self, active: ActiveRequest, error: OmniRelayError) -> None:
        self.end(active)
        self._on_failed(active, error)

    def _all(self) -> list[ActiveRequest]:
        return [*self._attempts.values(), *self._waiting.values()]

    def _requeue(self, active: ActiveRequest) -> None:
        """Abort the current attempt and wait for another placement, keeping the answer so far."""
        self._abort(active)
        active.record.begin_attempt()
        self._waiting[active.record.request_id] = active

    def _abort(self, active: ActiveRequest) -> None:
        if active.attempt is not None:
            del self._attempts[active.attempt.id]
            holders = [(stage, name) for stage in STAGES if (name := active.replica(stage))]
            self.aborts.abort(active.attempt.id, holders)
            active.attempt = None

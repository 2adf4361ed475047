"""Places requests on replicas, retries lost attempts, and refuses requests that end engines."""

import logging
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Final

from gateway.dispatch.aborts import AbortLedger
from gateway.dispatch.registry import Replica, StageRegistry
from gateway.dispatch.stage_transport import StageTransport
from gateway.requests.active import ActiveRequest, Attempt
from gateway.requests.lifecycle import Reason
from gateway.requests.metrics import GatewayMetrics
from omnirelay.error_codes import BY_CODE
from omnirelay.errors import (
    BusyError,
    EngineFailedError,
    MediaError,
    OmniRelayError,
    PoisonRequestError,
    QueueFullError,
    RequestError,
    StageFailedError,
    StageUnavailableError,
)
from shared.config import GatewayConfig
from shared.log import of_request
from shared.messages import STAGES, RequestFailed, Route, StageName

PAUSE_S: Final = 0.5
"""Delay before a retry after a failure: a stage whose engine failed reports it before it ends."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Dispatcher:
    """The attempts of all requests; ``resumes`` counts retries.

    Attributes:
        _on_failed: Called with a request that cannot be served and the reason, after it was removed here.
        _on_requeued: Called with a request that lost its attempt and waits for another.
        _waiting: Admitted requests without a replica.
    """

    _config: GatewayConfig
    _registry: StageRegistry
    _metrics: GatewayMetrics
    _stages: StageTransport
    _on_failed: Callable[[ActiveRequest, OmniRelayError], None]
    _on_requeued: Callable[[ActiveRequest], None]
    _clock: Callable[[], float] = time.monotonic
    resumes: int = 0
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
        self._waiting.pop(active.record.request_id, None)
        if completed and active.attempt is not None:
            del self._attempts[active.attempt.id]
        else:
            self._abort(active)

    def attempt_failed(self, active: ActiveRequest, failed: RequestFailed) -> None:
        """A stage reported that the attempt failed: retry, or fail the request."""
        stage, error = failed.stage, from_stage(failed)
        if failed.code == EngineFailedError.code:
            active.note_death(stage, active.replica(stage), engine_failed=True)
            self._registry.engine_failed(stage, active.replica(stage))
        elif failed.code == PoisonRequestError.code:
            self._fail_poison(active, stage)
            return
        elif isinstance(error, BusyError):
            self._wait_for_room(active, stage, error.retry_after_ms / 1000)
            return
        elif not isinstance(error, StageFailedError | StageUnavailableError):
            self._fail(active, error)
            return
        self.retry(active, stage, "failed", error)

    def retry(
        self,
        active: ActiveRequest,
        stage: StageName,
        reason: Reason,
        error: OmniRelayError,
        innocent: bool = False,
    ) -> None:
        """Resume a request whose attempt was lost at a stage; ``error`` ends it if no attempts are left.

        An ``innocent`` one, whose attempt another request ended, loses no attempt.
        """
        active.innocent_resumes += innocent
        if active.resumes >= self._config.resume_attempts + active.innocent_resumes:
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

    def _wait_for_room(self, active: ActiveRequest, stage: StageName, pause_s: float) -> None:
        """Try again later, until the deadline: a stage is full of other requests, so nothing is refused."""
        log.info("request %s waits for room at the %s, which others have", active.name, stage)
        active.avoid.add((stage, active.replica(stage)))
        active.not_before = self._clock() + pause_s
        active.interruptions += 1
        self._requeue(active)

    def held_by(self, replica: Replica) -> list[ActiveRequest]:
        """The requests for which a replica still has work."""
        return [
            active
            for active in self._attempts.values()
            if active.replica(replica.stage) == replica.name and active.record.needs(replica.stage)
        ]

    def note_death(self, replica: Replica, engine_failed: bool) -> None:
        """A replica died: refuse the request that it computed alone, or count it against all that it had."""
        stage, name, alone = replica.stage, replica.name, replica.beat.alone
        there = {attempt_id.partition(".")[0] for attempt_id in self.aborts.unconfirmed(stage, name)}
        there |= {active.record.request_id for active in self.held_by(replica)}
        for active in self._all():
            if alone is None and active.record.request_id in there:
                active.note_death(stage, name, engine_failed)
            elif alone is not None and active.record.request_id == alone.partition(".")[0]:
                self._fail_poison(active, stage)

    def remove_death(self, stage: StageName, name: str) -> None:
        """A replica that was taken for dead is alive."""
        for active in self._all():
            active.deaths.pop((stage, name), None)

    def _try(self, active: ActiveRequest) -> bool:
        """Start an attempt if there is a route and the thinker's queue has room."""
        speaks, alone = active.record.speaks, active.suspected_at
        route = place(self._registry, speaks, active.avoid, active.near, alone)
        if route is None:
            return False
        think = active.record.ask(active.resumes + active.interruptions, route)
        try:
            self._stages.think(think)
        except (QueueFullError, StageUnavailableError) as error:
            log.debug("request %s waits: %s", active.name, error)
            return False
        self._registry.placed(route)
        active.attempt = Attempt(think.request_id, route)
        self._attempts[think.request_id] = active
        active.started()
        return True

    def _missing(self, active: ActiveRequest) -> StageName | None:
        """The first stage that the request needs and that has no ready replica."""
        needed = STAGES if active.record.speaks else STAGES[:1]
        return next((stage for stage in needed if self._registry.state(stage) != "ready"), None)

    def _fail_poison(self, active: ActiveRequest, stage: StageName) -> None:
        log.error(
            "request %s ended the engine of a %s that computed nothing else: refused", active.name, stage
        )
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
        self._on_requeued(active)
        self._waiting[active.record.request_id] = active

    def _abort(self, active: ActiveRequest) -> None:
        if active.attempt is not None:
            del self._attempts[active.attempt.id]
            holders = [(stage, name) for stage in STAGES if (name := active.replica(stage))]
            self.aborts.abort(active.attempt.id, holders)
            active.attempt = None


RETRY_BUSY_STAGE_MS: Final = 1000
"""A stage does not tell its own estimate."""


def from_stage(failed: RequestFailed) -> RequestError:
    """Convert a stage's error; codes internal to the stack become ``stage_failed``."""
    kind = BY_CODE.get(failed.code)
    if kind is not None and issubclass(kind, MediaError):
        # Starts with the name of the item at every place that raises it.
        return kind(failed.message)
    message = f"{failed.stage}: {failed.message}"
    if kind is not None and issubclass(kind, BusyError):
        return kind(message, RETRY_BUSY_STAGE_MS)
    if kind is None or kind is RequestError:
        return StageFailedError(f"{message} ({failed.code})")
    return kind(message)


NEAR: Final = 4
"""A preferred thinker is used if it has at most so many requests more than another."""


def place(
    registry: StageRegistry,
    speech: bool,
    avoid: Set[tuple[StageName, str]] = frozenset(),
    near: str | None = None,
    alone: tuple[StageName, ...] = (),
) -> Route | None:
    """Choose the least loaded replicas that are connected to each other; none if there is no route now.

    Args:
        speech: Without it the thinker alone is needed.
        avoid: Used only if there is no other: the request failed there.
        near: The thinker that has computed the beginning of the prompt.
        alone: As in the route.
    """

    def candidates(stage: StageName, ready: Iterable[Replica]) -> list[Replica]:
        return sorted(ready, key=lambda each: (stage, each.name) in avoid)

    thinkers = candidates("thinker", thinkers_for(registry, near))
    if not speech:
        return Route(thinker=thinkers[0].name, alone=alone) if thinkers else None
    talkers, last = (candidates(stage, registry.ready(stage)) for stage in STAGES[1:])
    ends = {each.name: next((end.name for end in last if end.name in each.peers), None) for each in talkers}
    for thinker in thinkers:
        for name, token2wav in ends.items():
            if token2wav is not None and name in thinker.peers:
                return Route(thinker=thinker.name, talker=name, token2wav=token2wav, alone=alone)
    return None


def thinkers_for(registry: StageRegistry, near: str | None) -> list[Replica]:
    """The ready thinkers, the least loaded first; before them ``near``, unless it is much more loaded."""
    ready = registry.ready("thinker")
    if not ready:
        return []
    most = ready[0].work[0] + NEAR
    return sorted(ready, key=lambda each: each.name != near or each.work[0] > most)

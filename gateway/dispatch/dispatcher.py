"""Gives requests to replicas, and again to others when those are lost."""

import logging
import time
from collections.abc import Callable, Mapping, Set
from typing import Final, Protocol

import msgspec

from gateway.dispatch.aborts import AbortLedger
from gateway.dispatch.placement import place
from gateway.dispatch.registry import NEXT, Replica, StageRegistry
from gateway.dispatch.suspects import Death, Suspects
from gateway.requests.active import ActiveRequest, Attempt
from gateway.requests.lifecycle import Reason
from gateway.requests.metrics import GatewayMetrics
from omnirelay.errors import OmniRelayError, PoisonRequestError, QueueFullError, StageUnavailableError
from shared.config import Config
from shared.log import limited, of_request
from shared.messages import (
    STAGES,
    AbortDone,
    ControlToGateway,
    Farewell,
    Heartbeat,
    Peers,
    StageName,
    ThinkRequest,
)

PAUSE_S: Final = 0.5
"""Between a failure and the next attempt: a stage whose engine has failed says so, and then ends."""
_WHAT: Final[dict[Reason, str]] = {
    "silent": "does not answer any more",
    "hung": "has been in one step for too long",
    "restarted": "was restarted",
    "left": "has ended",
    "cut off": "is cut off",
    "failed": "failed",
}
log = logging.getLogger(__name__)


class StagePort(Protocol):
    """The way to the stages, see :class:`gateway.dispatch.stage_transport.StageTransport`."""

    def think(self, request: ThinkRequest) -> None:
        """Ask the thinker of the request's route; raises QueueFullError if it has no room for it now."""
        ...

    def abort(self, stage: StageName, replica: str, request_id: str) -> None:
        """Tell a replica to drop a request."""
        ...

    def tell(self, stage: StageName, replica: str, peers: Peers) -> None:
        """Answer a replica's heartbeat."""
        ...

    def say_goodbye(self, stage: StageName, replica: str) -> None:
        """Tell a replica that this gateway ends."""
        ...

    def reach(self, thinkers: dict[str, str]) -> None:
        """Be connected to exactly these replicas of the thinker."""
        ...

    def breaks(self) -> dict[str, int]:
        """How often the connection to a replica of the thinker has ended; without those of none."""
        ...


class Dispatcher:
    """Follows requests and replicas; knows nothing of clients.

    Args:
        name: The gateway's.
        config: The whole stack's.
        registry: The replicas.
        metrics: Counts what happens.
        stages: The way to the stages.
        give_up: Called with a request that cannot be served, and why.
        clock: Gives monotonic seconds.

    Attributes:
        resumes: Attempts that were lost and begun anew.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        registry: StageRegistry,
        metrics: GatewayMetrics,
        stages: StagePort,
        give_up: Callable[[ActiveRequest, OmniRelayError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resumes = 0
        self._name = name
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._stages = stages
        self._give_up = give_up
        self._clock = clock
        self._aborts = AbortLedger(stages.abort, metrics.abort.observe, clock)
        self._suspects = Suspects()
        self._attempts: dict[str, ActiveRequest] = {}
        # Those that have a place at the stages, and wait for a replica.
        self._waiting: dict[str, ActiveRequest] = {}
        self._draining = False
        # How often the connection to a thinker had ended at the last look.
        self._breaks: dict[str, int] = {}
        self._closed = False

    def drain(self) -> None:
        """This gateway ends when its requests have ended: the stages must be there until then."""
        self._draining = self._registry.gateway_drains = True

    def close(self) -> None:
        """Tell all replicas that this gateway ends; none is heard any more."""
        self._closed = True
        for replica in self._registry.replicas():
            self._stages.say_goodbye(replica.stage, replica.name)

    def of(self, attempt_id: str) -> ActiveRequest | None:
        """Whose attempt it is; none if it has ended, or is not the present one of its request."""
        return self._attempts.get(attempt_id)

    def begin(self, active: ActiveRequest) -> bool:
        """Give a request to the stages, or let it wait for one that is gone.

        Returns:
            False if it has to keep its place in the line: there is no room for it yet.
        """
        if self._try(active):
            return True
        if self._missing(active) is None:
            return False
        self._waiting[active.record.request_id] = active
        return True

    def end(self, active: ActiveRequest, completed: bool = False) -> None:
        """A request has ended: the stages forget it, if they do not know by themselves."""
        self._suspects.forget(active)
        self._waiting.pop(active.record.request_id, None)
        if completed and active.attempt is not None:
            del self._attempts[active.attempt.id]
        else:
            self._drop(active)

    def retry(self, active: ActiveRequest, stage: StageName, reason: Reason, error: OmniRelayError) -> None:
        """A request's attempt is lost: begin it anew from what there is of its answer.

        Args:
            active: The request.
            stage: Where it was lost.
            reason: Why.
            error: What its client is told if it is the last attempt.
        """
        if active.resumes >= self._config.gateway.resume_attempts:
            self._give_up(active, error)
            return
        about = of_request(active.record.request_id)
        log.warning("request %s is resumed: %s", active.name, error, extra=about)
        if reason == "failed" and active.attempt is not None:
            active.avoid.add((stage, active.attempt.route.replica(stage) or ""))
        self._drop(active)
        active.resumes += 1
        active.trouble = error
        active.not_before = self._clock() + (PAUSE_S if reason == "failed" else 0.0)
        self._wait_for_replicas(active)
        self.resumes += 1
        self._metrics.resumed(stage, reason)
        if active.trace is not None:
            active.trace.resumed(stage, reason)

    def engine_failed(self, active: ActiveRequest, stage: StageName, error: OmniRelayError) -> None:
        """A stage's engine failed with a request in work, and its process ends."""
        replica = active.attempt.route.replica(stage) if active.attempt is not None else None
        if self._suspects.add_death(active, stage, replica or "", "engine failed"):
            self._refuse(active, stage)
        else:
            self.retry(active, stage, "failed", error)

    def progressed(self, active: ActiveRequest) -> None:
        """More of an answer came: a request that is tried apart may have shown that it ends no engine."""
        cleared = self._suspects.clear(active)
        following = self._suspects.first
        if cleared and following is not None and following.apart & cleared:
            # The next one must be alone in its turn; what has come of this answer stays.
            log.info("request %s is not why an engine ended; it waits until others were tried", active.name)
            self._drop(active)
            active.interruptions += 1
            self._wait_for_replicas(active)
            self._go_on()

    def on_control(self, message: ControlToGateway) -> None:
        """Take what a replica says of itself, or the confirmation of an abort."""
        if isinstance(message, Heartbeat):
            if not self._closed:
                self._hear(message)
        elif isinstance(message, Farewell):
            left = self._registry.dismiss(message.stage, message.instance)
            if left is not None:
                self._lose(left, "left", for_good=True)
        elif isinstance(message, AbortDone):
            self._aborts.confirmed(message.stage, message.instance, message.request_id)

    def check(self) -> None:
        """Look for replicas that fell silent and for requests that can go on; to be called now and then."""
        breaks = self._stages.breaks()
        for name in _increased(self._breaks, breaks):
            self._cut_thinker(name)
        self._breaks = breaks
        for replica in self._registry.newly_down():
            self._lose(replica, self._registry.why_down(replica), died=True)
        self._aborts.keep(self._registry.get)
        self._go_on()

    def _go_on(self) -> None:
        """Give requests that wait to replicas, where that is possible now."""
        for active in list(self._waiting.values()):
            if self._clock() >= active.not_before and self._try(active):
                del self._waiting[active.record.request_id]
            else:
                self._check_patience(active)

    def _try(self, active: ActiveRequest) -> bool:
        """Make an attempt, if there is a route, and room at the thinker."""
        first = self._suspects.first
        if active in self._suspects and active is not first:
            return False
        think = active.record.ask(active.resumes + active.interruptions)
        closed = self._closed_to(active, first) if first is not None else frozenset()
        route = place(self._registry, think.speech is not None, active.avoid, closed)
        if route is None:
            return False
        try:
            self._stages.think(msgspec.structs.replace(think, route=route))
        except QueueFullError as error:
            log.debug("request %s waits: %s", active.name, error)
            return False
        self._registry.placed(route)
        active.attempt = Attempt(think.request_id, route)
        for stage, suspicion in active.suspicions.items():
            suspicion.tried_on = route.replica(stage) if stage in active.apart else None
        self._attempts[think.request_id] = active
        active.started()
        return True

    def _closed_to(self, active: ActiveRequest, first: ActiveRequest) -> Set[tuple[StageName, str]]:
        """The replicas that a request may not be given to, so that the first of the suspects runs alone."""
        if active is first:
            return {
                (stage, replica.name)
                for stage in first.apart
                for replica in self._registry.ready(stage)
                if self._held_by(replica)
            }
        if first.attempt is not None:
            return {(stage, first.attempt.route.replica(stage) or "") for stage in first.apart}
        # One replica of each stage becomes free for it; the others go on.
        free = (
            min(self._registry.ready(stage), key=lambda each: len(self._held_by(each)), default=None)
            for stage in first.apart
        )
        return {(replica.stage, replica.name) for replica in free if replica is not None}

    def _missing(self, active: ActiveRequest) -> StageName | None:
        """The first stage without which the request cannot go on, and which is not there."""
        needed = STAGES if active.record.speaks else STAGES[:1]
        return next((stage for stage in needed if self._registry.state(stage) != "ready"), None)

    def _check_patience(self, active: ActiveRequest) -> None:
        stage = self._missing(active)
        most_s = self._config.gateway.resume_wait_s
        if stage is not None and self._registry.missing_s(stage) > most_s:
            because = active.trouble or f"the {stage} is {self._registry.state(stage)}"
            error = StageUnavailableError(f"{because}, and no {stage} came back within {most_s:g} s")
            self._give_up(active, error)

    def _wait_for_replicas(self, active: ActiveRequest) -> None:
        """A request is to be given to the stages again, with what there is of its answer."""
        active.record.begin_attempt()
        self._waiting[active.record.request_id] = active

    def _refuse(self, active: ActiveRequest, stage: StageName) -> None:
        """A request ends engines."""
        log.error("request %s ended the engine of a %s that had no other: it is refused", active.name, stage)
        problem = (
            f"the {stage}'s engine ended while it worked on this request, "
            "and again while it worked on nothing else: it is not tried again"
        )
        self._give_up(active, PoisonRequestError(problem))

    def _note_death(self, replica: Replica, death: Death) -> None:
        """A replica died: what it had in work, or was told to drop and has not confirmed, may be why."""
        stage, name = replica.stage, replica.name
        there = {attempt_id.partition(".")[0] for attempt_id in self._aborts.unconfirmed(stage, name)}
        there |= {active.record.request_id for active in self._held_by(replica)}
        for active in self._living():
            if active.record.request_id in there and self._suspects.add_death(active, stage, name, death):
                self._refuse(active, stage)

    def _living(self) -> list[ActiveRequest]:
        """The requests that were given to the stages, and those that wait for them."""
        return [*self._attempts.values(), *self._waiting.values()]

    def _drop(self, active: ActiveRequest) -> None:
        """End the present attempt at all its stages."""
        attempt, active.attempt = active.attempt, None
        if attempt is None:
            return
        del self._attempts[attempt.id]
        route = ((stage, attempt.route.replica(stage)) for stage in STAGES)
        self._aborts.abort(attempt.id, [(stage, replica) for stage, replica in route if replica is not None])

    def _hear(self, beat: Heartbeat) -> None:
        stage, name = beat.stage, beat.instance
        registry = self._registry
        known = registry.get(stage, name)
        # Who stops everything tells stages and gateway at about the same time: a stage that is not needed now
        # may yet be for what stands in line here.
        drained_before = beat.draining and known is not None and known.beat.draining
        age_s = registry.heartbeat_age_s(stage, name)
        self._metrics.heartbeat(stage, age_s, self._config.stage(stage).heartbeat_s)
        left = known is not None and known.beat.gateway == self._name != beat.gateway
        cut = _increased(known.beat.breaks, beat.breaks) if known is not None else []
        was_down = known is not None and known.down
        for before in registry.note(beat):
            self._metrics.restarted(stage)
            self._lose(before, "restarted", for_good=True, died=True)
        replica = registry.get(stage, name)
        if was_down and replica is not None and not replica.down:
            self._suspects.remove_death(self._living(), stage, name)
        if replica is None:
            limited(log).warning(
                "a heartbeat of the %s %s says nothing: it has left, or is one too many", stage, name
            )
            return
        if left:
            # It has not heard from here for so long that it has dropped all it had.
            self._lose(replica, "silent")
        for receiver in cut:
            self._cut(replica, receiver)
        if stage == "thinker":
            self._stages.reach(registry.addresses("thinker"))
        self._aborts.resend(stage, name)
        following = NEXT.get(stage)
        peers = Peers(
            gateway=self._name,
            replicas=registry.addresses(following) if following else {},
            released=drained_before and not self._draining and not self._held_by(replica),
        )
        self._stages.tell(stage, name, peers)

    def _held_by(self, replica: Replica) -> list[ActiveRequest]:
        """The requests to which a replica still owes something."""
        return [
            active
            for active in self._attempts.values()
            if active.attempt is not None
            and active.attempt.route.replica(replica.stage) == replica.name
            and active.record.needs(replica.stage)
        ]

    def _cut(self, sender: Replica, receiver: str) -> None:
        """A replica's connection to one of the next stage, or to here, has ended.

        What was under way may be lost, and nobody would miss the last of it.
        """
        stage, following = sender.stage, NEXT.get(sender.stage)
        suspect = self._registry.get(following, receiver) if following else None
        if suspect is not None:
            # Others that send to it may not have looked yet: nothing is given to it by their way either.
            suspect.suspect = True
        error = StageUnavailableError(f"the {stage} lost its connection to the {following or 'gateway'}")
        for active in self._held_by(sender):
            route = active.attempt.route if active.attempt is not None else None
            if receiver == "gateway" or (route and following and route.replica(following) == receiver):
                self.retry(active, stage, "cut off", error)

    def _cut_thinker(self, name: str) -> None:
        """The connection to a thinker has ended: what it was asked may be lost, if nothing came of it yet."""
        replica = self._registry.get("thinker", name)
        if replica is None:
            return
        replica.suspect = True
        for active in self._held_by(replica):
            if active.record.text.next_seq == 0:
                error = StageUnavailableError("the connection to the thinker was lost")
                self.retry(active, "thinker", "cut off", error)

    def _lose(self, replica: Replica, reason: Reason, for_good: bool = False, died: bool = False) -> None:
        """A replica is gone, and what it held of requests with it.

        Args:
            replica: Which one.
            reason: How it is known.
            for_good: It cannot come back.
            died: Nobody knows why.
        """
        stage = replica.stage
        log.error("the %s %s %s", stage, replica.name, _WHAT[reason])
        if died and not replica.beat.draining:
            self._note_death(replica, "unexplained")
        for active in self._held_by(replica):
            self.retry(active, stage, reason, StageUnavailableError(f"the {stage} {_WHAT[reason]}"))
        if for_good:
            self._aborts.forget(stage, replica.name)
        if stage == "thinker":
            self._stages.reach(self._registry.addresses("thinker"))


def _increased(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """The names whose count is higher than it was."""
    return [name for name, count in now.items() if count > before.get(name, 0)]

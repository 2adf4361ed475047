"""Follows the replicas by their heartbeats; reports lost ones to the dispatcher."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.registry import NEXT, Replica, StageRegistry
from gateway.dispatch.stage_transport import StageTransport
from gateway.requests.lifecycle import Reason
from gateway.requests.metrics import GatewayMetrics
from omnirelay.errors import StageUnavailableError
from shared.config import Config
from shared.log import limited
from shared.messages import AbortDone, Closing, ControlToGateway, Farewell, Heartbeat, Peers

_WHAT: Final[dict[Reason, str]] = {
    "silent": "does not answer any more",
    "hung": "has been in one step for too long",
    "restarted": "was restarted",
    "left": "has ended",
    "cut off": "is cut off",
    "failed": "failed",
}
log = logging.getLogger(__name__)


@dataclass(eq=False)
class ReplicaMonitor:
    """Takes control messages of replicas, and answers heartbeats."""

    _name: str
    _config: Config
    _registry: StageRegistry
    _metrics: GatewayMetrics
    _stages: StageTransport
    _dispatcher: Dispatcher
    _draining: bool = False
    _closed: bool = False
    # Lost connections per thinker at the last check.
    _breaks: dict[str, int] = field(default_factory=dict)

    def drain(self) -> None:
        """Release no replica until :meth:`close`: the open requests need them."""
        self._draining = True
        self._registry.set_gateway_drains(True)

    def close(self) -> None:
        """Tell all replicas that this gateway stops, and ignore heartbeats from now on."""
        self._closed = True
        for replica in self._registry.replicas():
            self._stages.tell(replica.stage, replica.name, Closing())

    def on_control(self, message: ControlToGateway) -> None:
        """Take a heartbeat, a farewell or a confirmed abort."""
        if isinstance(message, Heartbeat):
            if not self._closed:
                self._hear(message)
        elif isinstance(message, Farewell):
            if (left := self._registry.dismiss(message.stage, message.instance)) is not None:
                # Without draining before it: its engine failed.
                self._lose(left, "left", for_good=True, died=True)
        elif isinstance(message, AbortDone):
            self._dispatcher.aborts.confirmed(message.stage, message.instance, message.request_id)

    def check(self) -> None:
        """Detect new and lost thinker connections and silent or hung replicas; call it periodically."""
        self._reach_thinkers()
        breaks = self._stages.breaks()
        for name in _increased(self._breaks, breaks):
            self._cut_thinker(name)
        self._breaks = breaks
        for replica in self._registry.newly_down():
            self._lose(replica, self._registry.why_down(replica), died=True)
        self._dispatcher.aborts.keep(self._registry.get)

    def _hear(self, beat: Heartbeat) -> None:
        stage, name = beat.stage, beat.instance
        registry, dispatcher = self._registry, self._dispatcher
        known = registry.get(stage, name)
        # Not released on its first draining heartbeat: if the whole stack is being stopped, this gateway may
        # learn of it a moment later and still need the stage for queued requests.
        drained_before = beat.draining and known is not None and known.beat.draining
        age_s = registry.age_s(known) if known is not None else None
        interval_s = max(registry.heartbeat_s, self._config.stage(stage).heartbeat_s)
        self._metrics.heartbeat(stage, age_s, interval_s)
        left = known is not None and known.beat.gateway == self._name != beat.gateway
        cut = _increased(known.beat.breaks, beat.breaks) if known is not None else []
        was_down = known is not None and known.down
        for before in registry.note(beat):
            self._metrics.restarts.labels(stage).inc()
            self._lose(before, "restarted", for_good=True, died=True)
        replica = registry.get(stage, name)
        if was_down and replica is not None and not replica.down:
            dispatcher.remove_death(stage, name)
        if replica is None:
            limited(log).warning("ignored a heartbeat of the %s %s: it left, or is one too many", stage, name)
            return
        if left:
            # It has not heard from this gateway for so long that it dropped all its requests.
            self._lose(replica, "silent")
        for receiver in cut:
            self._cut(replica, receiver)
        if stage == "thinker":
            self._reach_thinkers()
        dispatcher.aborts.resend(stage, name)
        peers = Peers(
            gateway=self._name,
            replicas=registry.news(replica),
            heartbeat_s=registry.heartbeat_s,
            released=drained_before and not self._draining and not dispatcher.held_by(replica),
            alone=beat.alone,
        )
        self._stages.tell(stage, name, peers)

    def _cut(self, sender: Replica, receiver: str) -> None:
        """A replica lost a connection, and perhaps messages: nothing would reveal that the last is lost."""
        # The end of a receiver shows here first, so requests are lost there.
        lost = sender.stage if receiver == "gateway" else NEXT.get(sender.stage)
        if lost is None:
            return
        name = sender.name if receiver == "gateway" else receiver
        if (suspect := self._registry.get(lost, receiver)) is not None:
            # Other senders may not have noticed yet: no route leads to it until its next heartbeat.
            suspect.suspect = True
        other = "gateway" if receiver == "gateway" else lost
        error = StageUnavailableError(f"the {sender.stage} lost its connection to the {other}")
        for active in self._dispatcher.held_by(sender):
            if active.replica(lost) == name:
                self._dispatcher.retry(active, lost, "cut off", error)

    def _cut_thinker(self, name: str) -> None:
        """The connection to a thinker was lost: retry the requests of which nothing has come back."""
        replica = self._registry.get("thinker", name)
        if replica is None:
            return
        replica.suspect = True
        for active in self._dispatcher.held_by(replica):
            if active.record.text.next_seq == 0:
                error = StageUnavailableError("the connection to the thinker was lost")
                self._dispatcher.retry(active, "thinker", "cut off", error)

    def _lose(self, replica: Replica, reason: Reason, for_good: bool = False, died: bool = False) -> None:
        """A replica is lost: retry its requests, one of which may be the cause if it ``died``."""
        stage = replica.stage
        log.error("the %s %s %s", stage, replica.name, _WHAT[reason])
        if died and not replica.beat.draining:
            self._dispatcher.note_death(replica, engine_failed=reason == "left")
        for active in self._dispatcher.held_by(replica):
            error = StageUnavailableError(f"the {stage} {_WHAT[reason]}")
            self._dispatcher.retry(active, stage, reason, error, innocent=replica.beat.alone is not None)
        if for_good:
            self._dispatcher.aborts.forget(stage, replica.name)
        if stage == "thinker":
            self._reach_thinkers()

    def _reach_thinkers(self) -> None:
        self._registry.note_reached(self._stages.reach(self._registry.addresses("thinker")))


def _increased(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """The names whose count is higher than it was."""
    return [name for name, count in now.items() if count > before.get(name, 0)]

"""The replicas of all stages, from their heartbeats."""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, get_args

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.requests.lifecycle import Reason
from omnirelay.errors import StageUnavailableError
from omnirelay.status import CodecLimits, StageState, StageStatus
from shared.messages import MAX_REPLICAS, MISSED_HEARTBEATS, STAGES, Heartbeat, Route, StageName

FORGET_S: Final = 600.0
"""A replica that is silent for longer is removed."""
MAX_HEARTBEATS_PER_S: Final = 64
"""Of all replicas; more replicas send them less often."""
MAX_DEPARTED: Final = 1000
"""Names of replicas that have left, whose late heartbeats are ignored."""

NEXT: Final[dict[StageName, StageName]] = {"thinker": "talker", "talker": "token2wav"}
"""The stage to which a stage sends."""
BEST_FIRST: Final[tuple[StageState, ...]] = ("ready", "draining", "starting")
_NOBODY: Final[dict[str, str]] = {}
_BEFORE: Final = {receiver: sender for sender, receiver in NEXT.items()}


@dataclass
class Replica:
    """One process of a stage.

    Attributes:
        beat: Its last heartbeat.
        seen: Monotonic time of that.
        suspect: A connection to it broke since its last heartbeat.
        peers: Replicas of the next stage that it can send to.
        reaches: The registry's addresses of these, while they are all of the next stage.
        placed: Requests placed since the last heartbeat, and in the interval before, maybe not in it.
        failed: Its engine has failed, so its process is about to end.
    """

    beat: Heartbeat
    seen: float
    down: bool = False
    suspect: bool = False
    state: StageState = "starting"
    peers: frozenset[str] = frozenset()
    reaches: Mapping[str, str] | None = None
    placed: list[int] = field(default_factory=lambda: [0, 0])
    failed: bool = False

    def __post_init__(self) -> None:
        self.stage = self.beat.stage
        self.name = self.beat.instance

    @property
    def work(self) -> tuple[int, int]:
        """Load, comparable within a stage."""
        load = self.beat.load
        return load.running + load.waiting + sum(self.placed), load.held_bytes


@dataclass(eq=False)
class StageRegistry(Collector):
    """All known replicas.

    States depend on those of the senders and are updated incrementally: a heartbeat costs only its changes.

    Attributes:
        _timeout_s: A replica that is silent for longer, and for :data:`MISSED_HEARTBEATS` intervals, is down.
        _step_timeout_s: As is one whose loop is in one step for longer.
        _gateway: This gateway's name; replicas get requests once they have joined it.
        stages: The configured stages.
    """

    _timeout_s: float
    _step_timeout_s: float
    _gateway: str = ""
    _clock: Callable[[], float] = time.monotonic
    stages: Sequence[StageName] = STAGES
    gateway_drains: bool = False

    def __post_init__(self) -> None:
        self._replicas: dict[StageName, dict[str, Replica]] = {stage: {} for stage in STAGES}
        self._states: dict[StageName, Counter[StageState]] = {stage: Counter() for stage in STAGES}
        # By address, the replica listening there; by name, the number of ready senders that know it.
        self._listeners: dict[tuple[StageName, str], Replica] = {}
        self._senders: dict[StageName, Counter[str]] = {stage: Counter() for stage in STAGES}
        self._addresses: dict[StageName, dict[str, str]] = {}
        self._departed: OrderedDict[tuple[StageName, str], None] = OrderedDict()
        self._looked_at = -math.inf
        # Since when a stage has no ready replica.
        self._missing_since: dict[StageName, float | None] = dict.fromkeys(STAGES, self._clock())
        self._known_once: set[StageName] = set()
        # None until the gateway has tried.
        self._reached: frozenset[str] | None = None

    @property
    def heartbeat_s(self) -> float:
        """Least time between two heartbeats of a replica."""
        return sum(map(len, self._replicas.values())) / MAX_HEARTBEATS_PER_S

    def engine_failed(self, stage: StageName, name: str) -> None:
        """Place nothing more at a replica."""
        if (replica := self.get(stage, name)) is not None:
            replica.failed = True
            self._settle(replica)

    def set_gateway_drains(self, drains: bool) -> None:
        """While the gateway drains, draining replicas still serve its queue."""
        self.gateway_drains = drains
        for replica in self.replicas():
            self._settle(replica)

    def get(self, stage: StageName, name: str) -> Replica | None:
        """A replica, if it is known."""
        return self._replicas[stage].get(name)

    def replicas(self) -> list[Replica]:
        """All known replicas."""
        return [each for replicas in self._replicas.values() for each in replicas.values()]

    def note(self, beat: Heartbeat) -> list[Replica]:
        """Take a heartbeat; return the replicas that its sender has replaced at its address, now removed."""
        replicas = self._replicas[beat.stage]
        known = replicas.get(beat.instance)
        departed = (beat.stage, beat.instance) in self._departed
        if departed or (known is None and not self._has_room(beat.stage)):
            return []
        if known is None:
            known = replicas[beat.instance] = Replica(beat, self._clock(), peers=frozenset(beat.peers or ()))
            self._states[beat.stage][known.state] += 1
            self._known_once.add(beat.stage)
        if beat.inbox != known.beat.inbox:
            self._stop_listening(known)
        if beat.peers is not None:
            self._note_peers(known, frozenset(beat.peers))
        known.beat, known.seen, known.suspect = beat, self._clock(), False
        known.placed = [0, known.placed[0]]
        if beat.busy_s > self._step_timeout_s:
            self._looked_at = -math.inf
        if known.down and not self._lost(known, known.seen, self._silent_s):
            self._mark(known, down=False)
        before = self._listeners.get((beat.stage, beat.inbox))
        if before is not known:
            self._listeners[beat.stage, beat.inbox] = known
            self._addresses.pop(beat.stage, None)
            if before is not None:
                self.dismiss(beat.stage, before.name)
        self._settle(known)
        return [before] if before is not None and before is not known else []

    def note_reached(self, thinkers: Set[str]) -> None:
        """Note to which thinkers the gateway has a connection: no other is ready."""
        before, self._reached = self._reached, frozenset(thinkers)
        for name in self._reached ^ (before or frozenset(self._replicas["thinker"])):
            if (replica := self.get("thinker", name)) is not None:
                self._settle(replica)

    def dismiss(self, stage: StageName, name: str) -> Replica | None:
        """Remove a replica that has left, and return it."""
        self._departed[stage, name] = None
        if len(self._departed) > MAX_DEPARTED:
            self._departed.popitem(last=False)
        if (left := self.get(stage, name)) is not None:
            self._remove(left)
        return left

    def excuse(self, away_s: float) -> None:
        """The gateway could not receive for so long: extend all timeouts."""
        for each in self.replicas():
            each.seen = min(self._clock(), each.seen + away_s)
        for stage, since in self._missing_since.items():
            if since is not None:
                self._missing_since[stage] = since + away_s

    def newly_down(self) -> list[Replica]:
        """Replicas that fell silent or hang since the last call; take all pending heartbeats before."""
        now, silent_s = self._clock(), self._silent_s
        # Called ten times a second; many replicas may be silent for long.
        if now - self._looked_at < silent_s / 20:
            return []
        self._looked_at, known = now, self.replicas()
        lost = [each for each in known if not each.down and self._lost(each, now, silent_s)]
        for each in lost:
            self._mark(each, down=True)
        for each in [each for each in known if now - each.seen > FORGET_S]:
            self._remove(each)
        return lost

    def why_down(self, replica: Replica) -> Reason:
        """Why a replica is down."""
        return "hung" if self.age_s(replica) <= self._silent_s else "silent"

    def state(self, stage: StageName) -> StageState:
        """The best state of a stage's replicas."""
        for state in BEST_FIRST:
            if self._states[stage][state]:
                return state
        return "down" if stage in self._known_once else "starting"

    def missing_s(self, stage: StageName) -> float:
        """Seconds without a ready replica of a stage."""
        since = self._missing_since[stage]
        return 0.0 if since is None else self._clock() - since

    def count(self, stage: StageName, state: StageState) -> int:
        """Number of a stage's replicas in a state."""
        return self._states[stage][state]

    def ready(self, stage: StageName) -> list[Replica]:
        """Replicas that may get requests, least loaded first."""
        able = [each for each in self._replicas[stage].values() if each.state == "ready" and not each.suspect]
        return sorted(able, key=lambda each: each.work)

    def addresses(self, stage: StageName) -> dict[str, str]:
        """Addresses of replicas that can receive, draining ones included."""
        if stage not in self._addresses:
            replicas = self._replicas[stage].values()
            self._addresses[stage] = {each.name: each.beat.inbox for each in replicas if not each.down}
        return self._addresses[stage]

    def news(self, replica: Replica) -> dict[str, str] | None:
        """Addresses of the replicas of its next stage; none if it is connected to exactly these."""
        following = NEXT.get(replica.stage)
        known = self.addresses(following) if following else _NOBODY
        if replica.reaches is not known:
            replica.reaches = known if replica.peers == known.keys() else None
        return known if replica.reaches is None else None

    def placed(self, route: Route) -> None:
        """A request was placed on these replicas."""
        for stage in STAGES:
            if (replica := self.get(stage, route.replica(stage) or "")) is not None:
                replica.placed[0] += 1

    def age_s(self, replica: Replica) -> float:
        """Seconds since a replica's last heartbeat."""
        return self._clock() - replica.seen

    def require(self, stages: Iterable[StageName]) -> None:
        """Raise StageUnavailableError with the names of stages that are not ready."""
        missing = [f"{stage} is {self.state(stage)}" for stage in stages if self.state(stage) != "ready"]
        if missing:
            raise StageUnavailableError(f"cannot serve this request now: {', '.join(missing)}")

    def speakers(self) -> list[str]:
        """All speakers that any stage knows, in their order."""
        return list(dict.fromkeys(name for each in self.replicas() for name in each.beat.limits.speakers))

    def codec(self) -> CodecLimits:
        """The codec of the talkers; the usual one if none has told of its own."""
        told = (each.beat.limits.codec for each in self._replicas["talker"].values())
        return next((codec for codec in told if codec is not None), CodecLimits())

    def max_positions(self, stage: StageName) -> int | None:
        """Context length of a stage: the smallest of its replicas', if known."""
        told = [each.beat.limits.max_positions for each in self._replicas[stage].values()]
        return min((most for most in told if most), default=None)

    def batch(self, stages: Iterable[StageName]) -> int:
        """How many requests the replicas of each of these compute at once; 0 if one has none that are up."""
        up = ([each for each in self._replicas[stage].values() if not each.down] for stage in stages)
        return min((sum(each.beat.limits.batch for each in replicas) for replicas in up), default=0)

    def report(self) -> list[StageStatus]:
        """The status of all replicas; a stage without any appears by itself."""
        told: list[StageStatus] = []
        for stage in self.stages:
            replicas = self._replicas[stage].values()
            told += [self._status(each) for each in replicas]
            told += [] if replicas else [StageStatus(name=stage, state=self.state(stage))]
        return told

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The metrics of stages and their replicas."""
        up = GaugeMetricFamily(
            "omnirelay_stage_up", "1 for a stage with a replica that is ready, else 0.", labels=["stage"]
        )
        replicas = GaugeMetricFamily(
            "omnirelay_stage_replicas", "Replicas of a stage by state.", labels=["stage", "state"]
        )
        for stage in self.stages:
            up.add_metric([stage], float(self.state(stage) == "ready"))
            for state in get_args(StageState):
                replicas.add_metric([stage, state], self.count(stage, state))
        return [up, replicas]

    def _has_room(self, stage: StageName) -> bool:
        """Make room for one more replica, by removing one that is down if necessary."""
        replicas = self._replicas[stage]
        if len(replicas) >= MAX_REPLICAS:
            down = (each for each in replicas.values() if each.down)
            gone = min(down, key=lambda each: each.seen, default=None)
            if gone is None:
                return False
            self._remove(gone)
        return True

    @property
    def _silent_s(self) -> float:
        """A replica that is silent for longer is down."""
        return max(self._timeout_s, MISSED_HEARTBEATS * self.heartbeat_s)

    def _lost(self, replica: Replica, now: float, silent_s: float) -> bool:
        return now - replica.seen > silent_s or replica.beat.busy_s > self._step_timeout_s

    def _state(self, replica: Replica) -> StageState:
        if replica.down:
            return "down"
        if replica.beat.gateway != self._gateway:
            return "starting"
        if replica.stage == "thinker" and self._reached is not None and replica.name not in self._reached:
            return "starting"
        sender = _BEFORE.get(replica.stage)
        if sender and self._states[sender]["ready"] and not self._senders[replica.stage][replica.name]:
            # No sender knows it yet.
            return "starting"
        draining = replica.failed or (replica.beat.draining and not self.gateway_drains)
        return "draining" if draining else "ready"

    def _settle(self, replica: Replica) -> None:
        """Update a replica's state, and those of replicas it sends to."""
        stage, before, now = replica.stage, replica.state, self._state(replica)
        if now == before:
            return
        replica.state = now
        self._states[stage][before] -= 1
        self._states[stage][now] += 1
        if self.state(stage) == "ready":
            self._missing_since[stage] = None
        elif self._missing_since[stage] is None:
            self._missing_since[stage] = self._clock()
        self._note_ready(replica, (now == "ready") - (before == "ready"))

    def _note_ready(self, replica: Replica, change: int) -> None:
        """A replica became ready (1) or ceased to be (-1)."""
        following = NEXT.get(replica.stage)
        if following is None or not change:
            return
        self._count_senders(following, replica.peers, change)
        if self._states[replica.stage]["ready"] == max(change, 0):
            # The first ready sender, or the last one, changes who counts as reachable.
            for each in list(self._replicas[following].values()):
                self._settle(each)

    def _note_peers(self, replica: Replica, peers: frozenset[str]) -> None:
        before, replica.peers, replica.reaches = replica.peers, peers, None
        following = NEXT.get(replica.stage)
        if following is not None and replica.state == "ready":
            self._count_senders(following, peers - before, 1)
            self._count_senders(following, before - peers, -1)

    def _count_senders(self, stage: StageName, names: Iterable[str], change: int) -> None:
        """One sender more or less knows these replicas."""
        senders, replicas = self._senders[stage], self._replicas[stage]
        for name in names:
            senders[name] += change
            if senders[name] == 0:
                del senders[name]
            if name in replicas:
                self._settle(replicas[name])

    def _mark(self, replica: Replica, down: bool) -> None:
        replica.down = down
        self._addresses.pop(replica.stage, None)
        self._settle(replica)

    def _stop_listening(self, replica: Replica) -> None:
        place = replica.stage, replica.beat.inbox
        if self._listeners.get(place) is replica:
            del self._listeners[place]

    def _remove(self, replica: Replica) -> None:
        self._mark(replica, down=True)
        self._stop_listening(replica)
        self._states[replica.stage]["down"] -= 1
        del self._replicas[replica.stage][replica.name]

    def _status(self, replica: Replica) -> StageStatus:
        beat = replica.beat
        return StageStatus(
            name=beat.stage,
            state=replica.state,
            replica=beat.instance,
            inbox=beat.inbox,
            heartbeat_age_s=self.age_s(replica),
            pid=beat.pid,
            peak_memory_bytes=beat.peak_memory_bytes,
            load=beat.load,
            limits=beat.limits,
        )

"""The replicas of all stages, from their heartbeats."""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import product
from typing import Final, get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.requests.lifecycle import Reason
from omnirelay.errors import StageUnavailableError
from omnirelay.status import CodecLimits, StageState, StageStatus
from shared.messages import MAX_REPLICAS, MISSED_HEARTBEATS, STAGES, Heartbeat, Route, StageName
from shared.metrics import gauge

FORGET_S: Final = 600.0
"""A replica that is down, and silent for longer, is removed."""
MAX_HEARTBEATS_PER_S: Final = 64
"""Of all replicas; more replicas send them less often."""
MAX_DEPARTED: Final = 1000
"""Names of replicas that have left, whose late heartbeats are ignored."""

NEXT: Final[dict[StageName, StageName]] = {"thinker": "talker", "talker": "token2wav"}
"""The stage to which a stage sends."""
BEST_FIRST: Final[tuple[StageState, ...]] = ("ready", "draining", "starting")


@dataclass
class Replica:
    """One process of a stage.

    Attributes:
        beat: Its last heartbeat.
        seen: Monotonic time of that.
        suspect: A connection to it broke since its last heartbeat.
        peers: Replicas of the next stage that it can send to.
        placed: Requests placed since the last heartbeat, and in the interval before, maybe not in it.
        failed: Its engine has failed, so its process is about to end.
    """

    beat: Heartbeat
    seen: float
    down: bool = False
    suspect: bool = False
    state: StageState = "starting"
    peers: frozenset[str] = frozenset()
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

    States depend on those of the senders.  They are found again when something has changed; most heartbeats
    change nothing.

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
        self._addresses: dict[StageName, dict[str, str]] = {stage: {} for stage in STAGES}
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
            self._update()

    def set_gateway_drains(self, drains: bool) -> None:
        """While the gateway drains, draining replicas still serve its queue."""
        self.gateway_drains = drains
        self._update()

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
        before = None
        if known is None:
            known = replicas[beat.instance] = Replica(beat, self._clock())
            self._known_once.add(beat.stage)
        else:
            before = known.beat.inbox, known.beat.gateway, known.beat.draining, known.peers, known.down
        known.peers = known.peers if beat.peers is None else frozenset(beat.peers)
        known.beat, known.seen, known.suspect = beat, self._clock(), False
        known.placed = [0, known.placed[0]]
        if beat.busy_s > self._step_timeout_s:
            self._looked_at = -math.inf
        known.down = known.down and self._lost(known, known.seen, self._silent_s)
        replaced: list[Replica] = []
        if before != (beat.inbox, beat.gateway, beat.draining, known.peers, known.down):
            others = (each for each in replicas.values() if each is not known)
            replaced = [each for each in others if each.beat.inbox == beat.inbox]
            for each in replaced:
                self.dismiss(beat.stage, each.name)
            self._update()
        return replaced

    def note_reached(self, thinkers: Set[str]) -> None:
        """Note to which thinkers the gateway has a connection: no other is ready."""
        if self._reached != thinkers:
            self._reached = frozenset(thinkers)
            self._update()

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
            each.down = True
        if lost:
            self._update()
        for each in [each for each in known if each.down and now - each.seen > FORGET_S]:
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
        return self._addresses[stage]

    def news(self, replica: Replica) -> dict[str, str] | None:
        """Addresses of the replicas of its next stage; none if it is connected to exactly these."""
        following = NEXT.get(replica.stage)
        known = self._addresses[following] if following else {}
        return None if replica.peers == known.keys() else known

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

    def collect(self) -> Iterator[Metric]:
        """The metrics of stages and their replicas."""
        yield gauge(
            "omnirelay_stage_up",
            "1 if the stage has a ready replica, else 0.",
            (({"stage": stage}, self.state(stage) == "ready") for stage in self.stages),
        )
        places = product(self.stages, get_args(StageState))
        yield gauge(
            "omnirelay_stage_replicas",
            "Replicas of a stage by `state`.",
            (({"stage": stage, "state": state}, self.count(stage, state)) for stage, state in places),
        )

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

    def _update(self) -> None:
        """Find the states of all replicas again, from the first stage to the last."""
        # Names that may become ready; none if there is nobody who must know them.
        known: Set[str] | None = self._reached
        for stage in STAGES:
            replicas = self._replicas[stage].values()
            for each in replicas:
                each.state = self._state(each, known)
            ready = [each for each in replicas if each.state == "ready"]
            known = frozenset[str]().union(*(each.peers for each in ready)) if ready else None
            self._states[stage] = Counter(each.state for each in replicas)
            self._addresses[stage] = {each.name: each.beat.inbox for each in replicas if not each.down}
            if ready:
                self._missing_since[stage] = None
            elif self._missing_since[stage] is None:
                self._missing_since[stage] = self._clock()

    def _state(self, replica: Replica, known: Set[str] | None) -> StageState:
        if replica.down:
            return "down"
        if replica.beat.gateway != self._gateway or (known is not None and replica.name not in known):
            return "starting"
        draining = replica.failed or (replica.beat.draining and not self.gateway_drains)
        return "draining" if draining else "ready"

    def _remove(self, replica: Replica) -> None:
        replica.down = True
        del self._replicas[replica.stage][replica.name]
        self._update()

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

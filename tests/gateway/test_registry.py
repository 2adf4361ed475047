"""What the gateway knows of replicas: their states, their work, and how many there may be."""

import random
import sys
from types import FrameType
from typing import Any

import pytest

from gateway.dispatch import registry as module
from gateway.dispatch.dispatcher import place
from gateway.dispatch.registry import MAX_HEARTBEATS_PER_S, Replica, StageRegistry
from shared.messages import (
    MAX_REPLICAS,
    MISSED_HEARTBEATS,
    STAGES,
    Heartbeat,
    StageLimits,
    StageLoad,
    StageName,
)
from tests.gateway.bench import Patch


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> StageRegistry:
    return StageRegistry(1.5, 300.0, "gate", clock)


def beat(name: str, stage: StageName = "thinker", inbox: str = "", **values: object) -> Heartbeat:
    load = StageLoad(running=int(str(values.pop("running", 0))))
    given = {"gateway": "gate", **values}
    return Heartbeat(
        stage=stage,
        pid=1,
        instance=name,
        inbox=inbox or f"ipc://{name}",
        limits=StageLimits(max_positions=9),
        load=load,
        **given,  # type: ignore[arg-type]
    )


def test_the_states_of_a_replica(registry: StageRegistry, clock: Clock) -> None:
    assert registry.state("thinker") == "starting"
    registry.note(beat("a", gateway=None))
    assert registry.state("thinker") == "starting"
    registry.note(beat("a"))
    assert registry.state("thinker") == "ready"
    registry.note(beat("a", draining=True))
    assert registry.state("thinker") == "draining"
    clock.now = 2.0
    assert registry.state("thinker") == "draining", "only a look finds it down"
    assert [each.name for each in registry.newly_down()] == ["a"]
    assert registry.newly_down() == []
    assert registry.state("thinker") == "down"
    registry.note(beat("a"))
    assert registry.state("thinker") == "ready"
    registry.note(beat("a", busy_s=301.0))
    (hung,) = registry.newly_down()
    assert registry.why_down(hung) == "hung"
    registry.dismiss("thinker", "a")
    assert registry.state("thinker") == "down", "it was there once"
    assert registry.note(beat("a")) == []
    assert registry.get("thinker", "a") is None, "who has left does not come back by a late heartbeat"


def test_how_long_a_stage_is_missing(registry: StageRegistry, clock: Clock) -> None:
    clock.now = 3.0
    assert registry.missing_s("thinker") == 3.0
    registry.note(beat("a"))
    assert registry.missing_s("thinker") == 0.0
    clock.now = 5.0
    registry.newly_down()
    clock.now = 6.0
    assert registry.missing_s("thinker") == 1.0


def test_a_replica_that_was_silent_for_long_is_forgotten(registry: StageRegistry, clock: Clock) -> None:
    registry.note(beat("a"))
    registry.note(beat("b", stage="talker"))
    clock.now = module.FORGET_S + 1
    registry.note(beat("b", stage="talker"))
    registry.newly_down()
    assert [(each.name, each.state) for each in registry.report()][:2] == [
        ("thinker", "down"),
        ("talker", "ready"),
    ]
    assert registry.get("thinker", "a") is None
    # Not before its requests were told: with this timeout it may be silent for so long.
    patient = StageRegistry(2 * module.FORGET_S, 300.0, "gate", clock)
    patient.note(beat("a"))
    clock.now += module.FORGET_S + 1
    assert patient.newly_down() == []
    assert patient.state("thinker") == "ready"


def test_no_more_are_known_than_may_be(registry: StageRegistry, clock: Clock, monkeypatch: Patch) -> None:
    monkeypatch.setattr(module, "MAX_REPLICAS", 2)
    for name in "abc":
        registry.note(beat(name))
    assert sorted(registry.addresses("thinker")) == ["a", "b"]
    clock.now = 2.0
    registry.note(beat("b"))
    registry.newly_down()
    registry.note(beat("c"))
    assert sorted(registry.addresses("thinker")) == ["b", "c"]
    assert registry.get("thinker", "a") is None


def test_a_successor_at_the_same_address(registry: StageRegistry) -> None:
    registry.note(beat("a", inbox="ipc://x"))
    assert [each.name for each in registry.note(beat("b", inbox="ipc://x"))] == ["a"]
    assert list(registry.addresses("thinker")) == ["b"]


def test_work_is_what_is_told_and_what_was_placed_since(registry: StageRegistry) -> None:
    registry.note(beat("a", running=2))
    registry.note(beat("b"))
    routes = []
    for _ in range(4):
        route = place(registry, speech=False)
        assert route is not None
        registry.placed(route)
        routes.append(route.thinker)
    assert routes.count("b") >= 3
    # A heartbeat may have been made before the last were placed; the next one knows of them.
    registry.note(beat("b", running=0))
    assert registry.ready("thinker")[0].work[0] >= 2
    registry.note(beat("b", running=3))
    registry.note(beat("b", running=3))
    assert {each.name: each.work[0] for each in registry.ready("thinker")}["b"] == 3


def test_only_whom_a_sender_knows_is_ready(registry: StageRegistry) -> None:
    registry.note(beat("k", stage="talker", peers=["w"]))
    registry.note(beat("w", stage="token2wav"))
    assert registry.state("talker") == "ready", "nobody is there who could know it"
    registry.note(beat("a"))
    assert registry.state("talker") == "starting"
    assert place(registry, speech=True) is None
    registry.note(beat("a", peers=["k"]))
    assert registry.state("talker") == "ready"
    route = place(registry, speech=True)
    assert route is not None
    assert (route.thinker, route.talker, route.token2wav) == ("a", "k", "w")


def test_addresses_are_told_until_a_replica_is_connected_to_exactly_these(registry: StageRegistry) -> None:
    registry.note(beat("a", peers=[]))
    thinker = registry.get("thinker", "a")
    assert thinker is not None
    assert registry.news(thinker) is None, "there is no talker"
    registry.note(beat("k", stage="talker"))
    assert registry.news(thinker) == {"k": "ipc://k"}
    registry.note(beat("a", peers=["k"]))
    assert registry.news(thinker) is None
    registry.note(beat("a", peers=None))
    assert registry.news(thinker) is None, "they are still the ones last told"
    assert registry.state("talker") == "ready"
    registry.note(beat("l", stage="talker"))
    assert registry.news(thinker) == {"k": "ipc://k", "l": "ipc://l"}
    registry.note(beat("a", peers=["l"]))
    assert registry.news(thinker) == {"k": "ipc://k", "l": "ipc://l"}, "the connection to one is lost"
    registry.dismiss("talker", "k")
    assert registry.news(thinker) is None


def test_many_replicas_send_heartbeats_less_often(registry: StageRegistry, clock: Clock) -> None:
    for number in range(MAX_REPLICAS):
        registry.note(beat(f"r{number}"))
    assert registry.heartbeat_s == MAX_REPLICAS / MAX_HEARTBEATS_PER_S
    clock.now = MISSED_HEARTBEATS * registry.heartbeat_s
    assert registry.newly_down() == []
    registry.note(beat("r0"))
    clock.now += 0.01 * registry.heartbeat_s
    assert registry.newly_down() == [], "they were looked at a moment ago"
    registry.note(beat("r0", busy_s=301.0))
    assert len(registry.newly_down()) == MAX_REPLICAS
    for number in range(MAX_REPLICAS):
        registry.dismiss("thinker", f"r{number}")
    assert registry.heartbeat_s == 0


def test_nobody_is_blamed_for_the_gateways_own_pauses(registry: StageRegistry, clock: Clock) -> None:
    registry.note(beat("a"))
    clock.now = 0.5
    registry.note(beat("b"))
    clock.now = 10.0
    registry.excuse(9.0)
    assert registry.newly_down() == []
    assert registry.missing_s("talker") == 1.0
    registry.note(beat("b"))
    clock.now = 10.6
    assert [each.name for each in registry.newly_down()] == ["a"]


def state_from_scratch(registry: StageRegistry, replica: Replica) -> str:
    """What a replica's state must be, by all that is known now."""
    index = STAGES.index(replica.stage)
    senders = [
        each
        for each in registry.replicas()
        if index and each.stage == STAGES[index - 1] and state_from_scratch(registry, each) == "ready"
    ]
    if replica.down:
        return "down"
    if replica.beat.gateway != "gate" or (
        senders and all(replica.name not in each.peers for each in senders)
    ):
        return "starting"
    return "draining" if replica.beat.draining and not registry.gateway_drains else "ready"


@pytest.mark.parametrize("seed", range(20))
def test_states_are_those_of_all_that_is_known_whatever_came_before(seed: int) -> None:
    chance, clock = random.Random(seed), Clock()
    registry = StageRegistry(1.5, 300.0, "gate", clock)
    names = {stage: [f"{stage}-{number}" for number in range(4)] for stage in STAGES}
    for _ in range(300):
        clock.now += chance.choice([0.0, 0.1, 0.7])
        stage = chance.choice(STAGES)
        name = chance.choice(names[stage])
        following = names[STAGES[STAGES.index(stage) + 1]] if stage != "token2wav" else []
        what = chance.random()
        if what < 0.85:
            peers = chance.sample(following, chance.randint(0, len(following)))
            inbox = chance.choice(["", "", "", "ipc://shared"])
            gateway = chance.choice(["gate", "gate", "gate", None])
            draining = chance.random() < 0.1
            registry.note(beat(name, stage, inbox, gateway=gateway, peers=peers, draining=draining))
        elif what < 0.95:
            registry.newly_down()
        elif what < 0.98:
            registry.dismiss(stage, name)
            names[stage].append(f"{stage}-{len(names[stage])}")
        else:
            registry.set_gateway_drains(not registry.gateway_drains)
        known = registry.replicas()
        assert {each.name: each.state for each in known} == {
            each.name: state_from_scratch(registry, each) for each in known
        }
        for each in STAGES:
            states = [replica.state for replica in known if replica.stage == each]
            assert registry.count(each, "ready") == states.count("ready")
            assert registry.count(each, "down") == states.count("down")
            told = {replica.name: replica.beat.inbox for replica in known if replica.stage == each}
            down = {replica.name for replica in known if replica.down}
            assert registry.addresses(each) == {name: told[name] for name in told if name not in down}


def lines_of_a_round(replicas: int) -> int:
    """Lines of code that run when each of so many replicas a stage sends one more heartbeat, and one look."""
    registry = StageRegistry(1.5, 300.0, "gate", Clock())
    names = {stage: [f"{stage}-{number}" for number in range(replicas)] for stage in STAGES}
    peers = {"thinker": names["talker"], "talker": names["token2wav"], "token2wav": []}
    beats = [beat(name, stage, peers=peers[stage]) for stage in STAGES for name in names[stage]]
    count = 0

    def counting(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return counting

    for each in beats:
        registry.note(each)
    before = sys.gettrace()
    sys.settrace(counting)
    try:
        for each in beats:
            registry.note(each)
            registry.state(each.stage)
            registry.addresses(each.stage)
        registry.newly_down()
    finally:
        sys.settrace(before)
    assert registry.count("token2wav", "ready") == replicas
    return count


def test_a_heartbeat_costs_no_more_where_there_are_more_replicas() -> None:
    """A round of all heartbeats is linear in their number, up to the most that there may be."""
    few, many = lines_of_a_round(8), lines_of_a_round(64)
    assert many <= 8 * few * 1.1

"""What is known of processes on a cluster, what a command waits for, and the rule of scaling."""

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from omnirelay import StatusReport
from omnirelay.errors import StageStartError
from omnirelay.status import GatewayStatus, StageLoad, StageState, StageStatus
from ops.cluster import commands
from ops.cluster.autoscaling import Autoscaler, Bounds, StackSample, StageSample
from ops.cluster.members import Member, Placed, Report, State, member, sample_of
from ops.cluster.plan import kind_of
from shared.messages import Role


def placed(
    name: str, pid: int = 7, host: str = "10.0.0.1", state: State = "running", restarts: int = 0
) -> Placed:
    report = Report(state, pid, restarts, "ended with exit status 1", ("broken",))
    return Placed(name, kind(name), "ab" * 28, host, report)


def kind(name: str) -> Role:
    found = kind_of(name)
    assert found is not None
    return found


def status(pid: int = 7, inbox: str = "tcp://10.0.0.1:4000", state: StageState = "ready") -> StatusReport:
    load = StageLoad(running=2, waiting=3)
    return StatusReport(
        gateway=GatewayStatus(pid=3, uptime_s=1.0, peak_memory_bytes=1, model="m"),
        stages=[StageStatus(name="talker", state=state, pid=pid, inbox=inbox, load=load)],
        requests={},
        refused={},
        dropped_events=0,
    )


@pytest.mark.parametrize(
    ("told", "ready", "requests"),
    [
        (status(), True, 5),
        (status(state="starting"), False, 5),
        (status(pid=8), False, 0),
        (status(inbox="tcp://10.0.0.2:4000"), False, 0),
        (None, False, 0),
    ],
)
def test_a_stage_is_ready_when_the_gateway_has_this_very_process(
    told: StatusReport | None, ready: bool, requests: int
):
    answers = {} if told is None else {"gateway-1": told}
    found = member("talker-1", "talker", False, placed("talker-1"), answers)
    assert (found.ready, found.requests) == (ready, requests)


def test_an_address_of_ipv6_is_that_of_its_node():
    there = placed("talker-1", host="fd00::7")
    answers = {"gateway-1": status(inbox="tcp://[fd00::7]:4000")}
    assert member("talker-1", "talker", False, there, answers).ready


def test_a_stage_is_ready_when_all_gateways_that_answer_have_it():
    for others, ready in ((status(), True), (status(state="down"), False), (status(pid=8), False)):
        answers = {"gateway-1": status(), "gateway-2": others}
        found = member("talker-1", "talker", False, placed("talker-1"), answers)
        assert (found.ready, found.requests) == (ready, 5)


def test_a_gateway_is_ready_when_it_answers_itself():
    answers = {"gateway-1": status()}
    for number, pid, ready in ((1, 3, True), (1, 4, False), (2, 3, False)):
        name = f"gateway-{number}"
        assert member(name, "gateway", False, placed(name, pid=pid), answers).ready == ready
    assert not member("gateway-1", "gateway", False, None, answers).ready


def known(name: str, ready: bool = True, draining: bool = False, requests: int = 0) -> Member:
    return Member(name, kind(name), draining, placed(name), ready, requests)


def test_replicas_that_drain_count_for_nothing_when_a_stage_is_scaled():
    members = [known("talker-1", requests=2), known("talker-2", False), known("talker-3", True, True, 9)]
    assert sample_of("talker", [*members, known("thinker-1", requests=5)]) == StageSample(2, 1, 2)


@pytest.mark.parametrize(
    ("members", "missing"),
    [
        ([known("gateway-1"), known("talker-1")], []),
        ([known("gateway-1"), known("gateway-2", ready=False), known("talker-1")], ["gateway-2"]),
        ([known("gateway-1"), known("gateway-2", draining=True), known("talker-1")], []),
        ([known("gateway-1"), known("talker-1"), known("thinker-1", ready=False)], []),
        ([known("talker-1")], ["the gateway"]),
        ([known("gateway-1", ready=False), known("talker-1")], ["gateway-1"]),
        ([known("gateway-1")], ["talker"]),
        ([known("gateway-1"), known("talker-1"), known("talker-2", draining=True)], ["the end of talker-2"]),
        (
            [known("gateway-1"), Member("talker-1", "talker", False, None, False, 0)],
            ["talker-1 (no node with free resources yet)"],
        ),
    ],
)
def test_what_a_command_waits_for(members: list[Member], missing: list[str]):
    assert commands.waiting_for(members, {"talker": 1}) == missing


def test_gateways_are_waited_for_as_stages_are():
    one, two = known("gateway-1"), known("gateway-2")
    assert commands.waiting_for([one], {"gateway": 2}) == ["gateway"]
    assert commands.waiting_for([one, two], {"gateway": 2}) == []
    leaving = known("gateway-2", draining=True)
    assert commands.waiting_for([one, leaving], {"gateway": 1}) == ["the end of gateway-2"]


def test_a_process_that_ends_again_and_again_is_reported_with_its_last_lines():
    broken = Member("talker-1", "talker", False, placed("talker-1", restarts=3), False, 0)
    with pytest.raises(StageStartError, match=r"(?s)talker-1 ended with exit status 1 .*\[talker-1\] broken"):
        commands.check([broken])
    # One that serves may have been killed as often.
    commands.check([Member("talker-1", "talker", False, placed("talker-1", restarts=9), True, 0)])
    commands.check([Member("talker-1", "talker", False, placed("talker-1", restarts=2), False, 0)])


def test_scaling_does_not_fail_for_what_has_ended_often_before(monkeypatch: pytest.MonkeyPatch):
    broken = Member("talker-1", "talker", False, placed("talker-1", restarts=9), False, 0)
    looks = iter([broken, broken, known("talker-1")])
    told = Mock(side_effect=lambda name, *_: [known("gateway-1"), next(looks)] if name == "members" else "")
    monkeypatch.setattr(commands, "connected", lambda _: nullcontext(Mock(call=told)))
    monkeypatch.setattr(commands, "POLL_S", 0)
    assert commands.scale(Namespace(address=None, numbers=[("talker", 1)])) == 0


def test_the_table_has_every_process():
    waits = Member("talker-2", "talker", False, None, False, 0)
    gateway = replace(
        placed("gateway-1"), clients=("tcp://10.0.0.1:5555", "http://" + "a" * 200 + ".example:8000")
    )
    there = Member("gateway-1", "gateway", False, gateway, True, 0)
    text = commands.describe([there, known("talker-1", requests=4), waits])
    # An address is never cut off.
    assert text.splitlines()[-1] == f"gateway-1: {', '.join(gateway.clients)}"
    rows = [line.split() for line in text.splitlines()]
    assert rows[2] == ["talker-1", "ready", "10.0.0.1", "abababab", "7", "0", "4"]
    assert "waits for a node" in text


BATCH = 8


def look(
    at: float, talker: StageSample, token2wav: StageSample, queued: int = 0, underruns: int = 0
) -> StackSample:
    return StackSample(at, queued, underruns, {"talker": talker, "token2wav": token2wav})


def ready(replicas: int, requests: int) -> StageSample:
    return StageSample(replicas, replicas, requests)


IDLE = ready(1, 0)


@pytest.fixture
def rule() -> Autoscaler:
    return Autoscaler({"talker": Bounds(1, 3, BATCH), "token2wav": Bounds(1, 3, BATCH)}, 10.0, 100.0)


Look = tuple[float, StageSample, StageSample, dict[str, int]]
"""When, the two stages, and what is wanted then."""
LOOKS: dict[str, list[Look]] = {
    "a full stage grows after its time and not before": [
        *((at, ready(1, 7), IDLE, {}) for at in (0, 9.9)),
        (10, ready(1, 7), IDLE, {"talker": 2}),
        (11, ready(1, 7), IDLE, {}),
    ],
    "a batch filled to the bound is not short": [(at, ready(1, 6), IDLE, {}) for at in range(0, 50, 2)],
    "a moment without need starts the time again": [
        (0, ready(1, 7), IDLE, {}),
        (8, ready(1, 5), IDLE, {}),
        *((at, ready(1, 7), IDLE, {}) for at in (10, 19.9)),
        (20, ready(1, 7), IDLE, {"talker": 2}),
    ],
    "no stage grows beyond its most": [(at, ready(3, 24), IDLE, {}) for at in range(0, 50, 2)],
    "an idle stage shrinks to its fewest, one at a time": [
        (0, ready(3, 0), IDLE, {}),
        (100, ready(3, 0), IDLE, {"talker": 2}),
        (101, ready(2, 0), IDLE, {}),
        (201, ready(2, 0), IDLE, {"talker": 1}),
        *((at, ready(1, 0), IDLE, {}) for at in (202, 999)),
    ],
    "a stage shrinks if the others would be half empty": [
        (0, ready(2, 4), IDLE, {}),
        (100, ready(2, 4), IDLE, {"talker": 1}),
    ],
    "and only then": [(at, ready(2, 5), IDLE, {}) for at in (0, 100)],
    "a stage whose replicas are not all ready stays": [
        (at, StageSample(2, 1, 16), StageSample(2, 1, 0), {}) for at in range(0, 150, 5)
    ],
}


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_stages_grow_and_shrink(rule: Autoscaler, looks: list[Look]):
    for at, talker, token2wav, wanted in looks:
        assert rule.wanted(look(at, talker, token2wav)) == wanted, at


@pytest.mark.parametrize("signs", [{"queued": [1, 1, 1]}, {"underruns": [1, 2, 3]}])
def test_the_fullest_stage_grows_where_requests_wait_or_listeners_hear_gaps(
    rule: Autoscaler, signs: dict[str, list[int]]
):
    def at(moment: float, index: int) -> dict[Any, int]:
        values = {name: numbers[index] for name, numbers in signs.items()}
        return dict(rule.wanted(look(moment, ready(1, 2), ready(1, 4), **values)))

    # The first look at a counter says nothing of a change.
    rule.wanted(look(-1, ready(1, 2), ready(1, 4)))
    assert at(0, 0) == {}
    assert at(5, 1) == {}
    assert at(10, 2) == {"token2wav": 2}


def test_old_gaps_and_a_gateway_that_counts_from_zero_again_are_no_need(rule: Autoscaler):
    for at, underruns in ((0, 9), (5, 9), (10, 0), (15, 0)):
        assert rule.wanted(look(at, ready(1, 2), IDLE, underruns=underruns)) == {}


def test_no_stage_shrinks_while_another_is_short(rule: Autoscaler):
    for at in range(0, 150, 5):
        assert "talker" not in rule.wanted(look(at, ready(2, 0), ready(3, 24)))


def test_stages_without_bounds_are_left_alone():
    fixed = Autoscaler({}, 1.0, 1.0)
    for at in range(5):
        assert fixed.wanted(look(at, ready(1, 99), ready(1, 99), queued=9)) == {}

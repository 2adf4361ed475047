"""Two gateways in front of the same stages: one is lost, the other one's answers do not notice.

That both lose a stage is in ``tests/chaos/test_chaos.py``.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from omnirelay import Client
from shared.messages import STAGES
from tests.chaos.load import Load
from tests.chaos.streams import Heard, Stream, check_heard, heard_of, speaks
from tests.support.http import get
from tests.support.processes import Processes, wait_until
from tests.support.proxy import Relay
from tests.support.restarting import OPEN
from tests.support.stack import PATIENT, free_addresses, make_config

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STREAMS: Final = 8
FIRST, SECOND = GATEWAYS = ("gateway", "gateway 2")


class Pair(NamedTuple):
    """A stack with two gateways.

    Attributes:
        processes: All of it.
        network: By which clients and stages reach the second one.
    """

    processes: Processes
    network: list[Relay]

    def address(self, gateway: str) -> str:
        """Where clients reach a gateway."""
        return self.network[0].address if gateway == SECOND else self.processes.address

    def idle(self) -> bool:
        """No gateway and no stage has work, and each gateway has each stage as ready."""
        reports = [self.processes.status(gateway) for gateway in GATEWAYS]
        return all(
            report is not None
            and not any(report.requests[state] for state in OPEN)
            and [each.state for each in report.stages] == ["ready"] * len(STAGES)
            and not any(
                each.load.running or each.load.waiting or each.load.held_bytes or each.load.outbox_bytes
                for each in report.stages
            )
            for report in reports
        )

    def metric(self, stage: str, name: str, reason: str | None = None) -> float:
        """A metric of a stage."""
        address = self.processes.config["stages"][stage]["http"]
        samples = get(address, "/metrics").metrics[name].samples
        return sum(each.value for each in samples if reason in (None, each.labels.get("reason")))


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    events, control = free_addresses(2)
    with ExitStack() as closing:
        inner = [closing.enter_context(Relay(address)) for address in (events, control)]
        config = make_config(
            tiny_checkpoint,
            # The stages reach the second gateway through the relays.
            gateway={
                **PATIENT,
                "drain_s": 60.0,
                "others": [{"events": inner[0].address, "control": inner[1].address}],
            },
        )
        processes = closing.enter_context(_Behind(config, tmp_path_factory.mktemp("pair"), events, control))
        outer = closing.enter_context(Relay(processes.addresses(SECOND)["listen"]))
        for name in (*GATEWAYS, *STAGES):
            processes.start(name)
        pair = Pair(processes, [outer, *inner])
        wait_until(pair.idle, "both gateways have all stages")
        yield pair


class _Behind(Processes):
    """The second gateway listens behind the relays that the stages know."""

    def __init__(self, config: dict[str, object], directory: Path, events: str, control: str) -> None:
        super().__init__(config, directory)
        self._behind = {"events": events, "control": control}

    def addresses(self, name: str) -> dict[str, str]:
        found = super().addresses(name)
        return {**found, **self._behind} if name == SECOND else found


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> list[Heard]:
    with Client(pair.address(FIRST)) as client:
        return heard_of([Stream(client, number) for number in range(STREAMS)])


@pytest.mark.parametrize("how", ["kill", "freeze", "cut"])
def test_a_lost_gateway_takes_its_requests_along_and_no_others(
    pair: Pair, undisturbed: list[Heard], how: str
) -> None:
    processes = pair.processes
    assert {pair.metric(stage, "omnirelay_stage_gateways") for stage in STAGES} == {len(GATEWAYS)}
    before = {stage: pair.metric(stage, "omnirelay_stage_drops_total", "orphaned") for stage in STAGES}
    lost = [pair.address(SECOND), pair.address(FIRST)]
    with Client(lost) as moving, Client(pair.address(FIRST)) as staying:
        theirs = [Stream(moving, number) for number in range(0, STREAMS, 2)]
        ours = [Stream(staying, number) for number in range(1, STREAMS, 2)]
        wait_until(lambda: speaks(theirs) and speaks(ours), "speech comes", 120)
        if how == "cut":
            for relay in pair.network:
                relay.cut()
        else:
            processes.signal(SECOND, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        check_heard(theirs, undisturbed)
        check_heard(ours, undisturbed)
        assert moving._client.address == pair.address(FIRST)
        http = processes.config["gateway"]["http"]
        assert [get(http, f"/v1/requests/{each.request_id}").json["resumes"] for each in ours] == [0] * 4
        # Of the lost one nothing is left, though it has told nobody.
        wait_until(lambda: not _busy(pair), "the stages are idle", 60)
    dropped = {
        stage: pair.metric(stage, "omnirelay_stage_drops_total", "orphaned") - before[stage]
        for stage in STAGES
    }
    assert max(dropped.values()) <= len(theirs)
    if how == "freeze":
        processes.signal(SECOND, signal.SIGCONT)
    else:
        processes.kill(SECOND)
        for relay in pair.network:
            relay.heal()
        processes.start(SECOND)
    wait_until(pair.idle, "both gateways have all stages again", 60)


def _busy(pair: Pair) -> bool:
    report = pair.processes.status(FIRST)
    return report is None or any(
        each.load.running or each.load.waiting or each.load.held_bytes for each in report.stages
    )


def test_every_process_is_replaced_under_load(pair: Pair, undisturbed: list[Heard]) -> None:
    """One after the other, as an operator does it: clients of both gateways notice nothing but time."""
    processes = pair.processes
    before = {name: processes.running[name].pid for name in (*STAGES, *GATEWAYS)}
    places = [pair.address(gateway) for gateway in GATEWAYS]
    with Load([places, places[::-1], places, places[::-1]], undisturbed) as load:
        load.wait_for_more()
        for name in (*STAGES, *GATEWAYS):
            processes.signal(name, signal.SIGTERM)
            assert processes.running.pop(name).wait(120) == 0
            processes.start(name)
            wait_until(lambda: all(processes.ready(gateway=each) for each in GATEWAYS), "all are ready")
            load.wait_for_more()
    assert load.wrong == []
    wait_until(pair.idle, "nothing is left", 60)
    assert not {name for name, pid in before.items() if processes.running[name].pid == pid}

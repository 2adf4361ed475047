"""Real processes that are killed, frozen and stopped while eight streams run."""

import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from omnirelay import Client
from shared.messages import STAGES, StageName
from tests.chaos.streams import Heard, Stream, check_heard, heard_of
from tests.support.processes import Processes, wait_until
from tests.support.stack import PATIENT, make_config

pytestmark = pytest.mark.long

STREAMS = 8
HEARTBEAT_S = 5.0
"""Longer than other work takes the cores for, which would look like a loss."""


def complete(stack: Processes, *stages: StageName) -> None:
    """Start all replicas at once that some stages lack, and wait until each has two."""
    for name in (name for stage in stages for name in (stage, f"{stage} 2")):
        if name not in stack.running:
            stack.start(name)

    def both_ready() -> bool:
        report = stack.status()
        ready = Counter(each.name for each in report.stages if each.state == "ready") if report else Counter()
        return all(ready[stage] == 2 for stage in stages)

    wait_until(both_ready, "both replicas are ready")


@pytest.fixture(scope="module")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two replicas of each stage."""
    patient = {stage: {"drain_s": 60.0} for stage in STAGES}
    config = make_config(tiny_checkpoint, gateway={"heartbeat_timeout_s": HEARTBEAT_S}, stages=patient)
    with Processes(config, tmp_path_factory.mktemp("recovery")) as processes:
        processes.start("gateway")
        complete(processes, *STAGES)
        yield processes


@pytest.fixture(scope="module")
def undisturbed(stack: Processes) -> list[Heard]:
    with Client(stack.address) as client:
        return heard_of(eight(client))


def eight(client: Client) -> list[Stream]:
    return [Stream(client, number) for number in range(STREAMS)]


def idle(stack: Processes) -> bool:
    report = stack.status()
    return report is not None and not any(
        stage.load.running or stage.load.waiting or stage.load.held_bytes
        for stage in report.stages
        if stage.state != "down"
    )


def lost_at(stack: Processes, stage: str, since: float) -> float:
    """When the gateway, by its own log, first noticed since then that a stage had fallen silent."""
    told = [line for line in stack.log("gateway").splitlines() if "does not answer any more" in line]
    times = [datetime.fromisoformat(line.split()[0]).timestamp() for line in told if stage in line]
    return next(each for each in times if each >= since)


def speaking(client: Client) -> bool:
    """Every stream is under way, and none near its end."""
    counts = client.status().requests
    return counts["thinking"] + counts["talking"] == STREAMS


@pytest.mark.parametrize(("number", "stage"), [(signal.SIGSTOP, "token2wav"), (signal.SIGKILL, "thinker")])
def test_a_replica_is_lost_while_eight_streams_run(
    stack: Processes, undisturbed: list[Heard], stage: StageName, number: signal.Signals
) -> None:
    """Another one takes its place; of all stages and faults: ``tests/chaos``."""
    complete(stack, stage)
    with Client(stack.address) as client:
        wait_until(lambda: idle(stack), "nothing is left of what was before", 60)
        before = client.status().resumes
        streams = eight(client)
        wait_until(lambda: speaking(client), "eight streams run", 60)
        began = time.time()
        stack.signal(stage, number)
        wait_until(
            lambda: "down" in [each.state for each in client.status().stages if each.name == stage],
            "the loss is noticed",
            60,
        )
        check_heard(streams, undisturbed)
        noticed_s = lost_at(stack, stage, began) - began
        assert noticed_s < 2 * HEARTBEAT_S, "the heartbeat's timeout, and the ticks"
        assert client.status().resumes > before
        if number == signal.SIGSTOP:
            stack.signal(stage, signal.SIGCONT)
            complete(stack, stage)
        else:
            stack.kill(stage)
        wait_until(lambda: idle(stack), "nothing is left at the stages", 60)


def test_a_replica_that_is_told_to_stop_ends_well_and_costs_nobody_anything(
    stack: Processes, undisturbed: list[Heard]
) -> None:
    complete(stack, *STAGES)
    with Client(stack.address) as client:
        for stage in STAGES:
            streams = eight(client)
            wait_until(lambda: speaking(client), "eight streams run", 60)
            before = client.status().resumes
            stack.signal(stage, signal.SIGTERM)
            process = stack.running.pop(stage)
            check_heard(streams, undisturbed)
            assert process.wait(60) == 0
            assert client.status().resumes == before, "all could end in time"
    complete(stack, *STAGES)


PLACES = 4
DRAIN_S = 60.0
END_S = 90.0


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Where the processes leave their logs, and nothing else."""
    yield tmp_path
    assert {path.suffix for path in tmp_path.iterdir()} == {".log", ".yaml"}


def all_end(stack: Processes, within_s: float) -> None:
    """Tell all at once, and again as a launcher does; none leaves a process, a port, or a status but 0."""
    family = [child for each in stack.running.values() for child in _family(each.pid)]
    for name in stack.running:
        stack.signal(name, signal.SIGTERM)
        stack.signal(name, signal.SIGINT)
    for name, process in stack.running.items():
        assert process.wait(within_s) == 0, stack.log(name)
        assert "Traceback" not in stack.log(name)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    gateway, stages = stack.config["gateway"], stack.config["stages"].values()
    addresses = [gateway[key] for key in ("listen", "events", "control", "http")]
    for address in (*addresses, *(each[key] for each in stages for key in ("inbox", "http"))):
        with closing(socket.socket()) as probe:
            assert probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def test_requests_in_work_and_in_line_end_unbroken_when_all_are_told_to_stop(
    tiny_checkpoint: Path, directory: Path
) -> None:
    gateway = {**PATIENT, "drain_s": DRAIN_S, "limits": {"max_active": PLACES}}
    stages = {stage: {"drain_s": DRAIN_S} for stage in STAGES}
    config = make_config(tiny_checkpoint, gateway=gateway, stages=stages)
    with Processes(config, directory) as stack, Client(stack.start_all().address) as client:
        undisturbed = heard_of(eight(client))
        streams = eight(client)
        wait_until(lambda: client.status().requests["queued"] == STREAMS - PLACES, "some wait in line")
        all_end(stack, END_S)
        check_heard(streams, undisturbed)
        assert not any("is resumed" in line for line in stack.log("gateway").splitlines())

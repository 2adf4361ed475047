"""Real processes that are killed, frozen and stopped while eight streams run."""

import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from omnirelay import AudioEvent, Client, GenerateRequest, SamplingOverrides, TextEvent
from shared.messages import STAGES, StageName
from tests.support.processes import Processes, wait_until
from tests.support.stack import make_config

pytestmark = pytest.mark.long

STREAMS = 8
TEXT_TOKENS, CODEC_TOKENS = 60, 240


class Heard(NamedTuple):
    """What a client got."""

    text: list[int]
    codes: list[int]
    audio: list[bytes]
    seqs: list[int]
    told: list[int]


def request_for(number: int) -> GenerateRequest:
    """Half of them greedy, half drawn with a seed."""
    draws = SamplingOverrides(
        max_tokens=TEXT_TOKENS, min_tokens=TEXT_TOKENS, temperature=0.0 if number % 2 else 0.9
    )
    return GenerateRequest(
        prompt_token_ids=[number + 1] * (10 + number),
        seed=number,
        chunk_frames=[12, 24, 48, 96],
        text_sampling=draws,
        codec_sampling=SamplingOverrides(max_tokens=CODEC_TOKENS, min_tokens=CODEC_TOKENS),
    )


def listen(client: Client, number: int) -> Heard:
    answer = client.chat(request_for(number))
    events = list(answer)
    audio = [event for event in events if isinstance(event, AudioEvent)]
    told = [token for event in events if isinstance(event, TextEvent) for token in event.token_ids]
    done = events[-1]
    assert not isinstance(done, TextEvent | AudioEvent)
    return Heard(
        done.text_token_ids,
        done.codec_token_ids,
        [event.samples.tobytes() for event in audio],
        [event.seq for event in audio],
        told,
    )


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
    config = make_config(tiny_checkpoint, gateway={"resume_wait_s": 120.0}, stages=patient)
    with Processes(config, tmp_path_factory.mktemp("recovery")) as processes:
        processes.start("gateway")
        complete(processes, *STAGES)
        yield processes


@pytest.fixture(scope="module")
def undisturbed(stack: Processes) -> list[Heard]:
    with Client(stack.address) as client, ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda number: listen(client, number), range(STREAMS)))


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


def check(heard: list[Heard], undisturbed: list[Heard]) -> None:
    for number, (now, before) in enumerate(zip(heard, undisturbed, strict=True)):
        assert now.seqs == list(range(len(now.seqs))), number
        assert now.told == now.text, number
        assert now.text == before.text, number
        assert now.codes == before.codes, number
        assert now.audio == before.audio, number


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_replica_is_lost_while_eight_streams_run(
    stack: Processes, undisturbed: list[Heard], stage: StageName, number: signal.Signals
) -> None:
    complete(stack, stage)
    with Client(stack.address) as client, ThreadPoolExecutor(STREAMS) as pool:
        wait_until(lambda: idle(stack), "nothing is left of what was before", 60)
        before = client.status().resumes
        answers = [pool.submit(listen, client, number) for number in range(STREAMS)]
        wait_until(lambda: speaking(client), "eight streams run", 60)
        began = time.time()
        stack.signal(stage, number)
        wait_until(
            lambda: "down" in [each.state for each in client.status().stages if each.name == stage],
            "the loss is noticed",
            60,
        )
        check([answer.result(120) for answer in answers], undisturbed)
        assert lost_at(stack, stage, began) - began < 2.5, "the heartbeat's timeout, and the ticks"
        assert client.status().resumes > before
        if number == signal.SIGSTOP:
            stack.signal(stage, signal.SIGCONT)
            complete(stack, stage)
        else:
            # It is started again with those that the next tests kill: starting takes longer than they do.
            stack.kill(stage)
        wait_until(lambda: idle(stack), "nothing is left at the stages", 60)


def test_a_replica_that_is_told_to_stop_ends_well_and_costs_nobody_anything(
    stack: Processes, undisturbed: list[Heard]
) -> None:
    complete(stack, *STAGES)
    with Client(stack.address) as client, ThreadPoolExecutor(STREAMS) as pool:
        for stage in STAGES:
            answers = [pool.submit(listen, client, number) for number in range(STREAMS)]
            wait_until(lambda: speaking(client), "eight streams run", 60)
            before = client.status().resumes
            stack.signal(stage, signal.SIGTERM)
            process = stack.running.pop(stage)
            check([answer.result(120) for answer in answers], undisturbed)
            assert process.wait(60) == 0
            assert client.status().resumes == before, "all could end in time"
    complete(stack, *STAGES)

"""SIGTERM for all processes at once, as an orchestrator or an init sends it, while they have requests."""

import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from omnirelay import Client, GenerateRequest, SamplingOverrides
from shared.messages import STAGES
from tests.support.processes import Processes, wait_until
from tests.support.stack import make_config

pytestmark = pytest.mark.long

STREAMS, PLACES = 8, 4
TEXT_TOKENS, CODEC_TOKENS = 24, 96
DRAIN_S = 60.0
END_S = 90.0


def request_for(number: int) -> GenerateRequest:
    """An answer of known length, half of them in one piece."""

    def draws(tokens: int) -> SamplingOverrides:
        return SamplingOverrides(max_tokens=tokens, min_tokens=tokens)

    return GenerateRequest(
        prompt_token_ids=[number + 1] * (10 + number),
        seed=number,
        streaming=number % 2 == 0,
        text_sampling=draws(TEXT_TOKENS),
        codec_sampling=draws(CODEC_TOKENS),
    )


def started(model: Path, directory: Path) -> Processes:
    config = make_config(
        model,
        gateway={"drain_s": DRAIN_S, "limits": {"max_active": PLACES}},
        stages={stage: {"drain_s": DRAIN_S} for stage in STAGES},
    )
    stack = Processes(config, directory)
    for name in ("gateway", *STAGES):
        stack.start(name)
    return stack


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
    with started(tiny_checkpoint, directory) as stack:
        wait_until(stack.ready, "all stages are ready")
        with Client(stack.address) as client:
            undisturbed = [client.chat(request_for(number)).result() for number in range(STREAMS)]
            answers = [client.chat(request_for(number)) for number in range(STREAMS)]
            wait_until(lambda: client.status().requests["queued"] == STREAMS - PLACES, "some wait in line")
            all_end(stack, END_S)
            results = [answer.result() for answer in answers]
        for result, expected in zip(results, undisturbed, strict=True):
            assert result.done.text_token_ids == expected.done.text_token_ids
            assert result.done.codec_token_ids == expected.done.codec_token_ids
            assert result.audio.size == expected.audio.size
        assert not any("is resumed" in line for line in stack.log("gateway").splitlines())

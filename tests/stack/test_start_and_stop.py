"""Starting the stack on a machine that is not right for it, and stopping it."""

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from omnirelay import AudioEvent, Client, SamplingOverrides
from tests.support.stack import RunningStack, make_config


@pytest.fixture(scope="module")
def own_stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack for a test that kills one of its processes, and for the one behind it, which stops it.

    It tells its coverage: it starts, answers, loses a stage and stops.
    """
    directory = tmp_path_factory.mktemp("stack")
    with RunningStack(make_config(tiny_checkpoint), directory, measured=True) as running:
        yield running


def children_of(running: RunningStack) -> list[psutil.Process]:
    return psutil.Process(running.process.pid).children(recursive=True)


@pytest.mark.long
def test_a_dead_stage_is_started_again_and_its_request_goes_on(own_stack: RunningStack) -> None:
    codec = SamplingOverrides(max_tokens=600, min_tokens=600)
    (talker,) = (child for child in children_of(own_stack) if "services.talker" in child.cmdline())
    with Client(own_stack.address) as client:
        answer = client.chat("Who?", seed=3, codec_sampling=codec)
        while not isinstance(next(answer), AudioEvent):
            pass
        talker.kill()
        result = answer.result()
        assert len(result.done.codec_token_ids) == 600
        assert client.status().resumes == 1
    assert any("talker was killed by SIGKILL: it is started again" in line for line in own_stack.output)


@pytest.mark.long
def test_the_stack_stops_within_ten_seconds_and_leaves_nothing(own_stack: RunningStack) -> None:
    children = children_of(own_stack)
    assert len(children) >= 4
    said = len(own_stack.output)
    assert own_stack.stop() < 10
    assert own_stack.process.returncode == 0
    assert not [line for line in own_stack.output[said:] if "killed" in line]
    assert not [line for line in own_stack.output if "Traceback" in line]
    assert not [child for child in children if child.is_running()]
    for address in (own_stack.address, *(each["inbox"] for each in own_stack.config["stages"].values())):
        with closing(socket.socket()) as probe:
            assert probe.connect_ex(("127.0.0.1", int(address.rpartition(":")[2]))) != 0

"""The stack's processes: how they start and stop, what they do while idle, and that memory stays flat."""

import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import psutil
import pytest

from omnirelay import Answer, AudioEvent, Client, SamplingOverrides
from tests.support.media import clip, encode_audio, picture, speech
from tests.support.stack import PATIENT, RunningStack, make_config


@pytest.fixture(scope="module")
def own_stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack for a test that kills one of its processes, and for the one behind it, which stops it.

    It tells its coverage: it starts, answers, loses a stage and stops.
    """
    directory = tmp_path_factory.mktemp("stack")
    config = make_config(tiny_checkpoint, gateway=PATIENT)
    with RunningStack(config, directory, measured=True) as running:
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


GROUPS = 3
"""The world's process groups: vLLM needs them to build an engine."""


def threads(pid: int | None) -> list[str]:
    return [(each / "comm").read_text().strip() for each in Path(f"/proc/{pid}/task").iterdir()]


def test_stages_keep_no_process_groups_of_one(stack: RunningStack):
    """Each has a thread that wakes a hundred times a second."""
    with Client(stack.address) as client:
        pids = {stage.name: stage.pid for stage in client.status().stages}
    assert set(pids) == {"thinker", "talker", "token2wav"}
    for name, pid in pids.items():
        groups = [thread for thread in threads(pid) if thread.startswith("gloo")]
        assert len(groups) == GROUPS, (name, groups)


REQUESTS = 500
FIRST = 50
AT_ONCE = 4
GROWTH = 1.05
TEXT = SamplingOverrides(max_tokens=4, temperature=0.0)
CODEC = SamplingOverrides(max_tokens=24, temperature=0.0)


def sound(number: int) -> bytes:
    """Other words each time."""
    start = 37 * number % 20_000
    return encode_audio(speech()[start : start + 16_000 + 50 * (number % 40)], 16_000, "wav")


def video(number: int) -> bytes:
    """The same pictures in another file: one with a box behind them that players pass over."""
    return clip("mp4", 1.5, 12, 112, 160, text="Hello!") + struct.pack(">I4sI", 12, b"free", number)


def ask(client: Client, number: int) -> Answer:
    """A request like no other: text, sound, picture, video, or several; every second answer is spoken."""
    kind = number // 2 % 6
    return client.chat(
        f"Question number {number}?",
        audio=[sound(number)] if kind in (1, 4) else [],
        images=[picture("png", number, 240, 180)] if kind in (2, 4) else [],
        videos=[video(number)] if kind in (3, 5) else [],
        use_audio_in_video=kind == 5,
        speech=number % 2 == 0,
        text_sampling=TEXT,
        codec_sampling=CODEC,
    )


def answer_all(client: Client, numbers: Iterator[int]) -> None:
    """Ask so many at once, and wait for every answer."""
    open_answers = deque(ask(client, number) for number in islice(numbers, AT_ONCE))
    while open_answers:
        open_answers.popleft().result()
        open_answers += [ask(client, number) for number in islice(numbers, 1)]


def resident(client: Client) -> dict[str, int]:
    """Bytes of each process, those that decode media together."""
    report = client.status()
    pids = {"gateway": report.gateway.pid} | {stage.name: stage.pid for stage in report.stages}
    sizes = {name: psutil.Process(pid).memory_info().rss for name, pid in pids.items()}
    decoders = psutil.Process(pids["thinker"]).children()
    return sizes | {"decoders": sum(decoder.memory_info().rss for decoder in decoders)}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_five_hundred_mixed_requests_leave_no_trace(stack: RunningStack) -> None:
    with Client(stack.address) as client:
        answer_all(client, iter(range(FIRST)))
        before = resident(client)
        answer_all(client, iter(range(FIRST, REQUESTS)))
        after = resident(client)
    growth = {name: after[name] / size for name, size in before.items()}
    assert all(ratio < GROWTH for ratio in growth.values()), (before, after)

"""The stack's processes: how they stop, what they do while idle, and that memory stays flat."""

import signal
import socket
import struct
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import psutil
import pytest

from omnirelay import Answer, Client, SamplingOverrides
from shared.messages import STAGES
from tests.chaos.streams import Stream, check_heard, heard_of
from tests.support.media import clip, encode_audio, picture, speech
from tests.support.processes import Processes, wait_until
from tests.support.stack import PATIENT, RunningStack, make_config


@pytest.mark.long
def test_the_stack_stops_within_ten_seconds_and_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with RunningStack(make_config(tiny_checkpoint, gateway=PATIENT), tmp_path) as running:
        children = psutil.Process(running.process.pid).children(recursive=True)
        assert len(children) >= 4
        said = len(running.output)
        assert running.stop() < 10
    assert running.process.returncode == 0
    assert not [line for line in running.output[said:] if "killed" in line]
    assert not [line for line in running.output if "Traceback" in line]
    assert not [child for child in children if child.is_running()]
    for address in (running.address, *(each["inbox"] for each in running.config["stages"].values())):
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


STREAMS = 8
PLACES = 4
DRAIN_S = 60.0
END_S = 90.0


def all_end(stack: Processes, within_s: float) -> None:
    """Tell all at once, and again as a launcher does; none leaves a process, a port, or a status but 0."""
    own = [psutil.Process(each.pid) for each in stack.running.values()]
    family = [*own, *(child for each in own for child in each.children(recursive=True))]
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


@pytest.mark.long
def test_requests_in_work_and_in_line_end_unbroken_when_all_are_told_to_stop(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    gateway = {**PATIENT, "drain_s": DRAIN_S, "limits": {"max_active": PLACES}}
    stages = {stage: {"drain_s": DRAIN_S} for stage in STAGES}
    config = make_config(tiny_checkpoint, gateway=gateway, stages=stages)
    with Processes(config, tmp_path) as stack, Client(stack.start_all().address) as client:
        undisturbed = heard_of([Stream(client, number) for number in range(STREAMS)])
        streams = [Stream(client, number) for number in range(STREAMS)]
        wait_until(lambda: client.status().requests["queued"] == STREAMS - PLACES, "some wait in line")
        all_end(stack, END_S)
        check_heard(streams, undisturbed)
        assert not any("is resumed" in line for line in stack.log("gateway").splitlines())
    assert {path.suffix for path in tmp_path.iterdir()} == {".log", ".yaml"}

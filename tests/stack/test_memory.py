"""Memory stays flat: 500 mixed requests in a row leave every process as large as the first 50 did."""

import struct
from collections import deque
from collections.abc import Iterator
from itertools import islice

import psutil
import pytest

from omnirelay import Answer, Client, SamplingOverrides
from tests.support.media import clip, encode_audio, picture, speech
from tests.support.stack import RunningStack

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
def test_five_hundred_mixed_requests_leave_no_trace(stack: RunningStack) -> None:
    with Client(stack.address) as client:
        answer_all(client, iter(range(FIRST)))
        before = resident(client)
        answer_all(client, iter(range(FIRST, REQUESTS)))
        after = resident(client)
    growth = {name: after[name] / size for name, size in before.items()}
    assert all(ratio < GROWTH for ratio in growth.values()), (before, after)

"""The start delay in simulated time: long enough that nothing stops later, and hardly longer."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from gateway.requests.start_delay import IGNORED_S, AnswerPace, Outlook, SpeechHistory
from omnirelay import AudioEvent
from shared.messages import SAMPLE_RATE
from tests.gateway.http_bench import MODEL, HttpBench, events_in
from tests.gateway.realtime import ANSWER, CHUNKS, add, ask, of_type

RATE = 50
BLOCK = 12
BLOCK_S = BLOCK / RATE
MAX_BLOCKS = 8


@dataclass
class Machine:
    """Three stages with constant rates.

    Attributes:
        text: Text tokens a second.
        codes: Codec tokens a second, if the text does not limit them.
        synthesis: Real-time factor of token2wav, which takes all whole blocks that are there, up to eight.
    """

    text: float
    codes: float
    synthesis: float

    def events(self, tokens: int, seconds: float) -> Iterator[tuple[float, str, float, bool]]:
        """What the gateway gets, in order: time, kind, amount, whether it is the last."""
        total = round(seconds * RATE)
        yield from sorted([*self._texts(tokens), *self._codes(tokens, total), *self._audio(tokens, total)])

    def _texts(self, tokens: int) -> list[tuple[float, str, float, bool]]:
        return [(each / self.text, "a text", 1, each == tokens - 1) for each in range(tokens)]

    def _code_times(self, tokens: int, total: int) -> list[float]:
        times: list[float] = []
        for each in range(total):
            row = min(each + 1, tokens - 1) / self.text
            times.append(max(row, times[-1] if times else 0.0) + 1 / self.codes)
        return times

    def _codes(self, tokens: int, total: int) -> list[tuple[float, str, float, bool]]:
        times = self._code_times(tokens, total)
        ends = [*range(BLOCK, total, BLOCK), total]
        return [
            (times[end - 1], "b codes", end - start, end == total)
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def _audio(self, tokens: int, total: int) -> list[tuple[float, str, float, bool]]:
        times = self._code_times(tokens, total)
        audio, start, free = [], 0, 0.0
        while start < total:
            end = start + BLOCK
            begin = max(free, times[min(end + BLOCK, total) - 1])
            while (
                end - start < MAX_BLOCKS * BLOCK
                and end + 2 * BLOCK <= total
                and times[end + 2 * BLOCK - 1] <= begin
            ):
                end += BLOCK
            if end + BLOCK > total and times[-1] <= begin:
                end = total
            end = min(end, total)
            free = begin + self.synthesis * (end - start) / RATE
            audio.append((free, "c audio", (end - start) / RATE, end == total))
            start = end
        return audio


class Gateway:
    """Sees answers arrive."""

    def __init__(self, most_s: float = 1000.0) -> None:
        self.history = SpeechHistory()
        self.now = 0.0
        self._most_s = most_s

    def answer(self, machine: Machine, tokens: int, seconds: float) -> tuple[float, float]:
        """The delay that was advised, and the least one without a gap."""
        pace = AnswerPace(self.history, RATE, 1, self._most_s, lambda: self.now)
        advised = first = heard = least = 0.0
        for self.now, kind, amount, last in machine.events(tokens, seconds):
            if kind == "a text":
                pace.text(1, last)
            elif kind == "b codes":
                pace.codes(int(amount))
            else:
                delay = pace.audio(amount, last)
                assert (delay is None) == (heard > 0)
                if delay is not None:
                    advised, first = delay, self.now
                least = max(least, self.now - first - heard if heard else 0.0)
                heard += amount
        pace.ended()
        return advised, least


machines = st.builds(
    Machine, text=st.floats(15, 200), codes=st.floats(20, 200), synthesis=st.floats(0.05, 1.5)
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@example(machine=Machine(15.0, 34.0, 1.0), tokens=101, ratio=0.25)
@given(machine=machines, tokens=st.integers(4, 150), ratio=st.floats(0.1, 0.4))
def test_with_the_advised_delay_nothing_stops(machine: Machine, tokens: int, ratio: float) -> None:
    gateway = Gateway()
    seconds = max(1.0, tokens * ratio)
    gateway.answer(machine, tokens, seconds)
    advised, least = gateway.answer(machine, tokens, seconds)
    # Players have a fifth of a second; a block is as exact as pieces are.
    assert advised >= least - IGNORED_S
    assert advised <= 1.2 * least + BLOCK_S


@settings(deadline=None, max_examples=50)
@given(
    text=st.floats(55, 200),
    codes=st.floats(60, 200),
    synthesis=st.floats(0.02, 0.5),
    tokens=st.integers(2, 100),
    answers=st.integers(0, 3),
)
def test_the_fast_wait_for_nothing(
    text: float, codes: float, synthesis: float, tokens: int, answers: int
) -> None:
    gateway, machine = Gateway(), Machine(text, codes, synthesis)
    for _ in range(answers):
        gateway.answer(machine, tokens, tokens / 4)
    advised, least = gateway.answer(machine, tokens, tokens / 4)
    assert advised == 0
    assert least < IGNORED_S


def test_only_the_text_is_waited_for_where_the_talker_is_fast() -> None:
    # 100 tokens at 25 a second: half of real time, for the 1.5 s behind the first piece and its look-ahead.
    gateway, machine = Gateway(), Machine(text=25, codes=150, synthesis=0.1)
    gateway.answer(machine, 100, 25)
    advised, least = gateway.answer(machine, 100, 25)
    assert least == pytest.approx(1.5, abs=0.1)
    assert least <= advised <= 1.2 * least


def test_the_first_answer_is_judged_by_its_own_rates_and_a_usual_length() -> None:
    usual = Outlook(rest_s=16 - BLOCK_S, unwritten_s=0, writing=0, speaking=1.25)
    advised, _ = Gateway().answer(Machine(text=200, codes=40, synthesis=0.1), 64, 16)
    assert advised == pytest.approx(1.1 * usual.least_delay, rel=0.05)


def test_a_delay_is_bounded_and_can_be_switched_off() -> None:
    slow = Machine(text=15, codes=20, synthesis=1.5)
    for most_s in (5.0, 0.0):
        gateway = Gateway(most_s)
        gateway.answer(slow, 100, 25)
        advised, least = gateway.answer(slow, 100, 25)
        assert least > 5
        assert advised == most_s


def test_one_disturbed_answer_delays_none_after_it() -> None:
    gateway, fast = Gateway(), Machine(text=100, codes=100, synthesis=0.2)
    for _ in range(3):
        gateway.answer(fast, 40, 10)
    gateway.answer(Machine(text=100, codes=5, synthesis=0.2), 40, 10)
    assert gateway.answer(fast, 40, 10)[0] == 0


def test_an_answer_is_expected_to_be_as_long_as_those_that_were_not_shorter() -> None:
    history = SpeechHistory()
    assert history.expect(4, written=True) == (4, 1.0)
    for tokens in range(10, 110, 10):
        history.ended(tokens, tokens / 5, 0)
    assert history.expect(0, written=False) == pytest.approx((80, 16))
    assert history.expect(50, written=False) == pytest.approx((90, 18))
    assert history.expect(200, written=False) == pytest.approx((250, 50))
    assert history.expect(50, written=True) == pytest.approx((50, 10))


def test_an_answer_of_one_piece_is_not_delayed() -> None:
    assert Gateway().answer(Machine(text=20, codes=20, synthesis=1.5), 3, 0.3) == (0.0, 0.0)


GATEWAY = {"max_start_delay_s": 5}
"""It advises delays."""


def advised_ms(b: HttpBench, end: int = 0) -> int:
    """Let an earlier answer have been spoken at half of real time; what follows from it for the next ones.

    ``end`` is the number of tokens that end the text.
    """
    b.process.gateway._spoken.spoke(2.0)
    seconds = (len(b.encode(ANSWER)) + end) / 4
    return round(1000 * min(5, 1.1 * (seconds - 2 * len(CHUNKS[0]) / SAMPLE_RATE)))


@pytest.mark.usefixtures("answers")
async def test_the_first_audio_event_says_how_long_to_wait(web: HttpBench) -> None:
    expected = advised_ms(web)
    assert expected > 0
    async with web.client() as client:
        events = [event async for event in client.chat("Hi")]
        delays = [event.start_delay_ms for event in events if isinstance(event, AudioEvent)]
        assert delays == [expected, *[0] * (len(CHUNKS) - 1)]
        whole = [event async for event in client.chat("Hi", streaming=False)]
    assert not any(event.start_delay_ms for event in whole if isinstance(event, AudioEvent))
    assert await web.metric("omnirelay_start_delay_seconds_count") == 1
    total = await web.metric("omnirelay_start_delay_seconds_sum")
    assert total == pytest.approx(expected / 1000, abs=1e-3)


@pytest.mark.usefixtures("answers")
async def test_a_stream_of_an_answer_has_it_in_its_first_audio(web: HttpBench) -> None:
    expected = advised_ms(web)
    answer = await web.post(modalities=["text", "audio"], audio={"format": "opus"}, stream=True)
    told = [each["choices"][0]["delta"].get("audio", {}) for each in events_in(answer.text)[:-1]]
    check_delays([each for each in told if "data" in each], expected)


@pytest.mark.usefixtures("answers")
async def test_a_stream_of_speech_has_it_in_its_first_audio(web: HttpBench) -> None:
    expected = advised_ms(web, end=1)
    speech = {"model": MODEL, "input": ANSWER, "response_format": "pcm", "stream_format": "sse"}
    answer = await web.http.post("/v1/audio/speech", json=speech)
    check_delays([each for each in events_in(answer.text) if "audio" in each], expected)


def check_delays(audio: list[Any], expected: int) -> None:
    assert len(audio) > 1
    assert [each.get("start_delay_ms") for each in audio] == [expected, *[None] * (len(audio) - 1)]


@pytest.mark.usefixtures("answers")
async def test_a_file_has_it_in_a_header(web: HttpBench) -> None:
    speech = {"model": MODEL, "input": ANSWER, "response_format": "wav"}
    for delay_ms in (advised_ms(web, end=1), 0):
        answer = await web.http.post("/v1/audio/speech", json=speech)
        assert answer.headers["X-Start-Delay-Ms"] == str(delay_ms)
        # The next one is after answers that were fast.
        for _ in range(3):
            web.process.gateway._spoken.spoke(0.5)


async def test_a_failure_before_the_first_audio_of_a_file_has_its_own_status(web: HttpBench) -> None:
    speech = {"model": MODEL, "input": "Hi", "response_format": "wav"}
    asking = asyncio.create_task(web.http.post("/v1/audio/speech", json=speech))
    request = await web.stages.request(0)
    await web.stages.text(request.request_id, 0, web.encode(ANSWER))
    await web.stages.fail(request.request_id, "talker", "stage_failed", "broken")
    assert (await asking).status_code == 500


@pytest.mark.usefixtures("answers")
async def test_a_realtime_session_is_told_with_the_first_audio(web: HttpBench, c: Connection) -> None:
    expected = advised_ms(web)
    await add(c)
    first, *others = of_type(await ask(c), "response.output_audio.delta")
    assert first.start_delay_ms == expected
    assert others
    assert all("start_delay_ms" not in each.model_fields_set for each in others)

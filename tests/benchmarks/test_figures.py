"""What is made of measurements: playback, percentiles, differences of counters, comparison of answers."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.measure.answer import MeasuredAnswer, play, timing
from benchmarks.measure.counters import Counters
from benchmarks.measure.results import Measured, Table, as_table, mean, percentile
from benchmarks.measure.workload import answer_of
from benchmarks.scenarios.concurrency import Compared
from benchmarks.scenarios.questions import RATE, question
from shared.messages import SAMPLE_RATE

WORKLOAD = answer_of(0.1)


def answer(index: int = 0, text: list[int] | None = None, samples: int = 2400) -> MeasuredAnswer:
    return MeasuredAnswer(
        index=index,
        sent=0.0,
        first_text=1.0,
        pieces=[(1.0, samples)],
        done=2.0,
        text_ids=[1] * WORKLOAD.text_tokens if text is None else text,
        codec_ids=[2] * WORKLOAD.codec_tokens,
    )


@pytest.mark.parametrize(
    ("pieces", "underruns", "silent_s"),
    [
        ([(10.0, SAMPLE_RATE), (11.0, SAMPLE_RATE), (11.5, SAMPLE_RATE)], 0, 0.0),
        # Late audio shifts what follows.
        ([(10.0, SAMPLE_RATE), (11.5, SAMPLE_RATE), (12.5, SAMPLE_RATE), (14.0, SAMPLE_RATE)], 2, 1.0),
        # An empty piece is not heard.
        ([(10.0, 0), (12.0, SAMPLE_RATE), (15.0, 0)], 0, 0.0),
        ([], 0, 0.0),
    ],
)
def test_late_audio_is_an_underrun(pieces: list[tuple[float, int]], underruns: int, silent_s: float) -> None:
    found, silence_s = play(pieces)
    assert found == underruns
    assert silence_s == pytest.approx(silent_s)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10 * SAMPLE_RATE)), min_size=1, max_size=20).map(
        lambda pieces: sorted(pieces, key=lambda piece: piece[0])
    )
)
def test_what_is_heard_and_silent_spans_the_time_until_the_end(pieces: list[tuple[float, int]]) -> None:
    underruns, stalled = play(pieces)
    heard = [(at, samples) for at, samples in pieces if samples]
    assert 0 <= underruns <= max(0, len(heard) - 1)
    assert (underruns == 0) == (stalled == 0)
    if heard:
        length = sum(samples for _, samples in heard) / SAMPLE_RATE
        # The last piece begins at the latest when it has come.
        assert heard[0][0] + length + stalled >= heard[-1][0] + heard[-1][1] / SAMPLE_RATE - 1e-9


def test_an_answer_is_heard_from_the_advised_start_on() -> None:
    pieces = [(1.0, SAMPLE_RATE), (2.5, SAMPLE_RATE), (3.25, SAMPLE_RATE)]
    found = timing(msgspec.structs.replace(answer(), pieces=pieces, start_delay_s=0.25))
    assert (found.ttfa_s, found.start_s) == (1.0, 1.25)
    assert (found.stalled_s, found.stalled_after_delay_s) == (0.5, 0.25)
    assert found.underruns_after_delay == 1


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_percentile_is_a_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    assert sum(value < found for value in values) < share * len(values)


def test_nothing_measured_is_no_number() -> None:
    assert math.isnan(mean([]))
    assert math.isnan(percentile([], 0.5))


def test_counters_are_summed_over_the_labels_that_are_not_asked_for() -> None:
    before = Counters({("n", (("edge", "a"), ("stage", "x"))): 1.0})
    after = Counters(
        {
            ("n", (("edge", "a"), ("stage", "x"))): 3.0,
            ("n", (("edge", "b"), ("stage", "x"))): 5.0,
            ("n", (("edge", "a"), ("stage", "y"))): 7.0,
        }
    )
    counted = after.since(before)
    assert counted.get("n", stage="x") == 7.0
    assert counted.get("n", edge="a") == 9.0
    assert counted.get("n", edge="c") == 0.0
    assert counted.labels("n", "edge", stage="x") == ["a", "b"]


def test_prompts_are_the_same_in_every_run_and_never_alike() -> None:
    assert WORKLOAD.prompt(3) == answer_of(0.1).prompt(3)
    assert len({tuple(WORKLOAD.prompt(index)) for index in range(50)}) == 50
    assert {len(WORKLOAD.prompt(index)) for index in range(5)} == {58}
    workload = answer_of(2.56)
    assert (workload.prompt_tokens, workload.text_tokens, workload.codec_tokens) == (58, 30, 128)


@pytest.mark.parametrize(
    ("ours", "unequal"),
    [
        ([answer(0), answer(1), answer(5)], []),
        (
            [answer(0, text=[1] * (WORKLOAD.text_tokens - 1) + [7], samples=2399)],
            [
                f"text_ids differ from transformers' at {WORKLOAD.text_tokens - 1} of {WORKLOAD.text_tokens}",
                "2399 samples, transformers 2400",
            ],
        ),
        ([answer(9, text=[1])], [f"(1, {WORKLOAD.codec_tokens}) tokens of text and speech"]),
    ],
)
def test_answers_that_differ_are_named_with_the_place(ours: list[MeasuredAnswer], unequal: list[str]) -> None:
    compared = Compared(WORKLOAD)
    compared.add("omnirelay", "8 at once", ours)
    compared.add("transformers", "1 at once", [answer(0), answer(1)])
    assert compared.count == sum(each.index in (0, 1) for each in ours)
    assert list(compared.unequal()) == [
        f"omnirelay, 8 at once, prompt {ours[0].index}: {each}" for each in unequal
    ]


def test_questions_are_as_long_as_asked_and_all_different() -> None:
    first, second = question(2.0, 1), question(2.0, 2)
    assert len(first) == len(second) == 2 * 2 * RATE
    assert first != second
    assert question(2.0, 1) == first


def test_a_table_has_medians_and_percentiles_and_numbers_on_the_right() -> None:
    rows = [Measured("a", {"s": [3.0, 1.0, 2.0], "bytes": [12345.0]}), Measured("b", {"s": [0.5]})]
    assert str(as_table("Times", rows)).splitlines() == [
        *("## Times: P50; P95", "", "|  | n | s | bytes |", "| --- | ---: | ---: | --- |"),
        *("| a | 3 | 2; 3 | 12,345 |", "| b | 1 | 0.5 |  |"),
    ]
    assert str(Table(title="", columns=["what"], rows=[["one"], [None]])).endswith("| one |\n|  |")

"""When streams are cut: on a simulated clock, against the least silence that any cuts could have."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.measure.answer import play
from services.token2wav.pace import Pace
from shared.config import SynthesisConfig
from tests.token2wav.simulation import (
    BLOCK,
    FRAME_S,
    GEOMETRY,
    MARGIN_S,
    Cost,
    as_soon_as_can_be,
    growing,
    least_silence,
    simulate,
    steady,
)

DOUBLING = [BLOCK, 2 * BLOCK, 4 * BLOCK, 8 * BLOCK]


def cost_of(fixed_s: float, block_s: float) -> Cost:
    """A chunk takes a time of its own, and for each block of its window."""
    return lambda frames: fixed_s + block_s * (frames / BLOCK + 1)


def heard(made: list[tuple[float, int]]) -> tuple[int, float]:
    """Gaps and seconds of silence."""
    return play([(at, round(frames * FRAME_S * 24_000)) for at, frames in made])


def new_pace(margin_s: float = MARGIN_S) -> Pace:
    return Pace(1, GEOMETRY.block_s, margin_s)


@st.composite
def fast_costs(draw) -> Cost:
    """One block takes at most four fifths of its sound."""
    one = draw(st.floats(0, 0.8 * GEOMETRY.block_s))
    fixed = draw(st.floats(0, one))
    return cost_of(fixed, (one - fixed) / 2)


@given(
    rate=st.floats(1.05 * 50, 400), seconds=st.floats(0.02, 30), cost=fast_costs(), margin_s=st.floats(0, 2)
)
@example(rate=53.0, seconds=3.09375, cost=cost_of(0.0, 0.096), margin_s=0.03125)
@settings(deadline=None, max_examples=80)
def test_no_gaps_at_a_rate_of_real_time(rate, seconds, cost, margin_s):
    """From a twentieth above it, when one block can be synthesized in four fifths of its time.

    The last chunk may have nearly two blocks, as a chunk of one needs a whole look-ahead: where synthesis
    is hardly faster than speech, it may come late by what it takes longer than one block.
    """
    arrivals = steady(max(seconds, FRAME_S), rate)
    made = simulate(arrivals, cost, margin_s=margin_s)
    assert heard(made[:-1]) == (0, 0.0)
    assert heard(made)[1] <= max(0.0, cost(made[-1][1]) - cost(BLOCK)) + 1e-9
    assert sum(frames for _, frames in made) == len(arrivals)
    # The first chunk did not wait.
    assert made[0][0] == pytest.approx(arrivals[min(2 * BLOCK, len(arrivals)) - 1] + cost(made[0][1]))


@given(rate=st.floats(20, 400), fixed_s=st.floats(0, 0.3), block_s=st.floats(0, 0.15), data=st.data())
@settings(deadline=None, max_examples=60)
def test_what_cannot_be_without_gaps_is_not_much_worse_than_it_must_be(rate, fixed_s, block_s, data):
    """With long chunks synthesis keeps up.  The best cuts know what will come, and what it takes."""
    cost = cost_of(fixed_s, block_s)
    arrivals = steady(data.draw(st.floats(0.5, 20)), rate)
    _, silence_s = heard(simulate(arrivals, cost))
    least_s = least_silence(arrivals, cost)
    assert silence_s >= least_s - 1e-9
    assert silence_s <= least_s + cost(8 * BLOCK) + 1e-9


def test_chunks_grow_with_what_can_wait() -> None:
    """And little more is computed than with chunks that double, where codes come fast."""
    cost, arrivals = cost_of(0.02, 0.02), steady(10.0, 150)
    cuts = [frames for _, frames in simulate(arrivals, cost)]
    assert cuts[:-1] == sorted(cuts[:-1])
    assert cuts[0] == BLOCK
    assert cuts.count(8 * BLOCK) >= 3
    doubling = growing(len(arrivals), DOUBLING)
    assert sum(map(cost, cuts)) <= 1.15 * sum(map(cost, doubling))


def test_codes_that_come_late_are_not_waited_for_twice() -> None:
    """After a pause of the talker what is there leaves at once, and the stream goes on without gaps."""
    cost = cost_of(0.05, 0.02)
    arrivals = steady(10.0, 75)
    late = [arrival + (5.0 if arrival > 3.0 else 0.0) for arrival in arrivals]
    made = simulate(late, cost)
    gaps, silence_s = heard(made)
    assert gaps == 1
    assert silence_s == pytest.approx(least_silence(late, cost), abs=0.05)


def test_a_margin_of_zero_lets_no_stream_wait() -> None:
    arrivals = steady(10.0, 60)
    made = simulate(arrivals, cost_of(0, 0.01), margin_s=0)
    # Each block leaves as soon as its look-ahead is there, but for the last, with which the stream ends.
    assert {frames for _, frames in made[:-1]} == {BLOCK}


def test_given_sizes_leave_as_soon_as_they_are_there() -> None:
    cost, arrivals = cost_of(0.01, 0.05), steady(10.0, 60)
    made = simulate(arrivals, cost, sizes=DOUBLING)
    expected = as_soon_as_can_be(arrivals, growing(len(arrivals), DOUBLING), cost)
    assert [frames for _, frames in made] == [frames for _, frames in expected]
    assert [at for at, _ in made] == pytest.approx([at for at, _ in expected])


@given(blocks=st.integers(1, 8), other=st.integers(1, 8), fixed_s=st.floats(0, 1), block_s=st.floats(0, 1))
def test_times_are_learnt_and_unknown_ones_not_underrated(blocks, other, fixed_s, block_s):
    def seconds(size: int) -> float:
        return fixed_s + block_s * (size + 1)

    pace = new_pace()
    # As long as its window sounds, before anything is known.
    assert pace.expected(blocks) == pytest.approx((blocks + 1) * GEOMETRY.block_s)
    for _ in range(50):
        pace.observe(blocks, seconds(blocks))
    assert pace.expected(blocks) == pytest.approx(seconds(blocks))
    assert pace.expected(other) >= seconds(other) - 1e-6
    for _ in range(50):
        for size in (1, 8):
            pace.observe(size, seconds(size))
    for size in range(1, 9):
        assert pace.expected(size) == pytest.approx(seconds(size), rel=0.1, abs=1e-6)


def test_the_choice() -> None:
    pace = new_pace(margin_s=0.5)
    for _ in range(100):
        for blocks in (1, 3, 8):
            pace.observe(blocks, 0.1 * (blocks + 1))
    # Due at 10, a chunk of two blocks must begin at 9.7: half a second before that is time.
    blocks, ask_at = pace.choose([1, 2], True, 10.0, 9.0)
    assert blocks == 0
    assert ask_at == pytest.approx(9.2, abs=0.02)
    assert pace.choose([1, 2], True, 10.0, ask_at) == (2, math.inf)
    # Nobody waits for what will not come, or for more than fits.
    assert pace.choose([1, 2], False, 10.0, 9.0) == (2, math.inf)
    # As much as will be in time.
    assert pace.choose([1, 2, 3, 4], True, 10.0, 9.65) == (2, math.inf)
    # Too late: a block plays 0.24 s, and takes 0.2.
    assert pace.choose([1, 2, 3], True, 10.0, 9.95) == (1, math.inf)
    slow = new_pace(margin_s=0.5)
    for _ in range(100):
        for blocks in (1, 3, 8):
            slow.observe(blocks, 0.5 + 0.1 * (blocks + 1))
    # 0.9 s for 0.72, 1.0 for 0.96, 1.1 for 1.2.
    assert slow.choose([1, 2, 3, 4, 5, 6], True, 10.0, 9.95) == (5, math.inf)
    assert slow.choose([1, 2, 3], True, 10.0, 9.95) == (3, math.inf)


@given(look_ahead=st.integers(0, 2), frames=st.integers(1, 300), rate=st.floats(20, 300), cost=fast_costs())
@settings(deadline=None, max_examples=60)
def test_streams_are_tiled_whatever_the_look_ahead(look_ahead, frames, rate, cost):
    config = SynthesisConfig(look_ahead_blocks=look_ahead)
    made = simulate(steady(frames * FRAME_S, rate), cost, config=config)
    assert sum(size for _, size in made) == frames
    assert all(size % BLOCK == 0 for _, size in made[:-1])


def test_one_slow_chunk_at_first_is_soon_made_up_for() -> None:
    """As the first of a new process is."""
    pace, cost = new_pace(), cost_of(0.05, 0.05)
    pace.observe(1, 1.0)
    assert pace.expected(1) == pytest.approx(1.0)
    for _ in range(4):
        pace.observe(1, cost(BLOCK))
    assert pace.expected(1) == pytest.approx((1.0 + 4 * cost(BLOCK)) / 5)
    for _ in range(25):
        pace.observe(1, cost(BLOCK))
    assert pace.expected(1) == pytest.approx(cost(BLOCK), rel=0.05)

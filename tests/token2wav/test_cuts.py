"""What cuts cost a listener."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cuts import BLOCK, growing, least_silence, playback, steady

DOUBLING = [BLOCK, 2 * BLOCK, 4 * BLOCK, 8 * BLOCK]


def free(_: int) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("rate", "gaps", "silence_s"), [(50, 3, 1.68), (60, 3, 1.12), (75, 3, 0.56), (100, 0, 0.0)]
)
def test_chunks_that_double_have_gaps_below_twice_real_time(rate: int, gaps: int, silence_s: float) -> None:
    """Even if synthesis took no time; a block at a time would have none."""
    arrivals = steady(10.0, rate)
    heard = playback(arrivals, growing(len(arrivals), DOUBLING), free)
    assert heard.gaps == gaps
    assert heard.silence_s == pytest.approx(silence_s)
    assert heard.first_audio == pytest.approx(24 / rate)
    alone = playback(arrivals, growing(len(arrivals), [BLOCK]), free)
    assert alone.silence_s == pytest.approx(0)
    assert least_silence(arrivals, free) == pytest.approx(0)


def test_below_real_time_the_least_silence_is_what_is_missing() -> None:
    arrivals = steady(9.6, 40)
    # All of it is there after 12 s.  The last chunk is two blocks, the rest has been heard by then.
    assert least_silence(arrivals, free) == pytest.approx(12 + 0.48 - 9.6 - 24 / 40)


def test_the_rest_of_a_stream_joins_the_last_chunk() -> None:
    assert growing(131, DOUBLING) == [12, 24, 48, 47]
    assert growing(30, [12]) == [12, 18]
    assert growing(5, DOUBLING) == [5]
    assert growing(30, [12], look_ahead=0) == [12, 12, 6]


@settings(deadline=None)
@given(data=st.data(), frames=st.integers(1, 150), rate=st.floats(30, 200), overhead=st.floats(0, 0.4))
def test_no_cuts_have_less_than_the_least_silence(
    data: st.DataObject, frames: int, rate: float, overhead: float
) -> None:
    def cost(target: int) -> float:
        return overhead + 0.003 * target

    arrivals = steady(frames * 0.02, rate)
    sizes = data.draw(st.lists(st.integers(1, 8), max_size=8))
    cuts = growing(frames, [BLOCK, *(BLOCK * size for size in sizes)])
    assert playback(arrivals, cuts, cost).silence_s >= least_silence(arrivals, cost) - 1e-9

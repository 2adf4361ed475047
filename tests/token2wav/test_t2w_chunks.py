from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import CheckpointError, InvalidRequestError
from services.token2wav.chunks import ChunkPlan, ChunkPlanner, CodecGeometry, Pick, largest
from shared.config import SynthesisConfig

GEOMETRY = CodecGeometry(block_size=24, repeats=2, max_frames=2400, unit_samples=240)
BLOCK = GEOMETRY.codes_per_block
DOUBLING = [BLOCK, 2 * BLOCK, 4 * BLOCK, 8 * BLOCK]


@st.composite
def configs(draw) -> SynthesisConfig:
    first = draw(st.integers(1, 3))
    return SynthesisConfig(
        first_chunk_blocks=first,
        max_chunk_blocks=draw(st.integers(first, 8)),
        look_ahead_blocks=draw(st.integers(0, 2)),
    )


@st.composite
def picks(draw) -> Pick:
    """Choose at random among what is there, or wait where that is allowed."""
    choices = draw(st.lists(st.integers(0, 20), min_size=1, max_size=20))
    asked = 0

    def pick(sizes: Sequence[int], may_wait: bool) -> int:
        nonlocal asked
        assert list(sizes) == sorted(set(sizes))
        choice = choices[asked % len(choices)]
        asked += 1
        return 0 if may_wait and choice % 3 == 0 else sizes[choice % len(sizes)]

    return pick


def run(
    planner: ChunkPlanner, arrivals: list[int], announce_late: bool = False, pick: Pick = largest
) -> list[tuple[ChunkPlan, int]]:
    """All plans, each with the number of frames received when it was made."""
    plans, received = [], 0
    for index, arrival in enumerate(arrivals):
        received += arrival
        final = index == len(arrivals) - 1 and not announce_late
        while (plan := planner.next_plan(received, final, pick)) is not None:
            plans.append((plan, received))
    while (plan := planner.next_plan(received, True, pick)) is not None:
        plans.append((plan, received))
    return plans


def sizes_of(plans: list[ChunkPlan]) -> list[int]:
    return [plan.target_end - plan.start for plan in plans]


arrival_patterns = st.lists(st.integers(0, 40), max_size=20)
no_sizes: list[int] = []
fixed_sizes = st.just(no_sizes) | st.lists(st.integers(1, 3).map(lambda blocks: blocks * BLOCK), max_size=5)


@given(
    config=configs(), sizes=fixed_sizes, arrivals=arrival_patterns, announce_late=st.booleans(), pick=picks()
)
@settings(deadline=None, max_examples=300)
def test_targets_tile_the_stream(config, sizes, arrivals, announce_late, pick):
    """Whoever chooses them: the request, or the pick; and whenever ids come."""
    config = config.model_copy(update={"max_chunk_blocks": max(config.max_chunk_blocks, 3)})
    planner = ChunkPlanner(config, GEOMETRY, sizes)
    plans = run(planner, arrivals, announce_late, pick)
    total = sum(arrivals)
    position = 0
    margin = max(config.look_ahead_blocks * BLOCK, 1)
    for index, (plan, received) in enumerate(plans):
        assert plan.index == index
        assert plan.start == position < plan.target_end
        assert plan.target_end <= plan.window_end <= received
        assert plan.start % BLOCK == 0
        assert plan.is_last == (index == len(plans) - 1)
        assert plan.target_end - plan.start < config.max_chunk_blocks * BLOCK + margin
        if not plan.is_last:
            assert plan.window_end - plan.target_end == config.look_ahead_blocks * BLOCK
        position = plan.target_end
    assert position == total
    assert planner.finished
    assert (not plans) == (total == 0)


@given(config=configs(), sizes=fixed_sizes.filter(bool), arrivals=arrival_patterns, pick=picks())
@settings(deadline=None, max_examples=200)
def test_given_sizes_depend_on_nothing_else(config, sizes, arrivals, pick):
    config = config.model_copy(update={"max_chunk_blocks": max(config.max_chunk_blocks, 3)})
    piecemeal = [plan for plan, _ in run(ChunkPlanner(config, GEOMETRY, sizes), arrivals, pick=pick)]
    at_once = [plan for plan, _ in run(ChunkPlanner(config, GEOMETRY, sizes), [sum(arrivals)])]
    assert piecemeal == at_once
    wanted = [sizes[min(index, len(sizes) - 1)] for index in range(len(piecemeal))]
    assert sizes_of(piecemeal)[:-1] == wanted[:-1]


@given(config=configs(), total=st.integers(1, 500), pick=picks(), again=picks(), data=st.data())
@settings(deadline=None, max_examples=200)
def test_a_resumed_stream_is_cut_as_before_up_to_what_was_delivered(config, total, pick, again, data):
    """And makes these chunks again, or none at all if none is left."""
    halves = [total // 2, total - total // 2]
    plans = [plan for plan, _ in run(ChunkPlanner(config, GEOMETRY), halves, pick=pick)]
    delivered = data.draw(st.integers(0, len(plans)))
    before = sizes_of(plans[:delivered])
    resumed = ChunkPlanner(config, GEOMETRY, delivered=before)
    cut = [plan for plan, _ in run(resumed, [total // 3, total - total // 3], pick=again)]
    assert resumed.finished
    if delivered == len(plans):
        assert not [plan for plan in cut if not plan.delivered]
        return
    again_made = [replace(plan, delivered=True, silent=True) for plan in plans[:delivered]]
    # The next chunk's audio fades in from that of the last of them.
    again_made[-1:] = [replace(plan, silent=False) for plan in again_made[-1:]]
    assert cut[:delivered] == again_made
    assert not any(plan.delivered for plan in cut[delivered:])
    assert sum(sizes_of(cut)) == total
    # The cuts of both, given as sizes, are cut in the same places by a stream that nothing happened to.
    largest_blocks = max(config.max_chunk_blocks, -(-max(sizes_of(cut)) // BLOCK))
    most = config.model_copy(update={"max_chunk_blocks": largest_blocks})
    whole = [-(-size // BLOCK) * BLOCK for size in sizes_of(cut)]
    assert sizes_of([plan for plan, _ in run(ChunkPlanner(most, GEOMETRY, whole), [total])]) == sizes_of(cut)


@given(
    config=configs(), blocks=st.lists(st.integers(1, 10), min_size=1, max_size=9), total=st.integers(0, 500)
)
@settings(deadline=None, max_examples=200)
def test_a_stream_cannot_have_delivered_more_than_it_has(config, blocks, total):
    delivered = [each * BLOCK for each in blocks]
    resumed = ChunkPlanner(config, GEOMETRY, delivered=delivered)
    margin = max(config.look_ahead_blocks * BLOCK, 1)
    while (plan := resumed.next_plan(total, False)) is not None:
        if plan.index < len(blocks):
            assert plan.delivered
    if total == sum(delivered) or total >= sum(delivered) + margin:
        resumed.check_end(total)
    else:
        with pytest.raises(InvalidRequestError, match=f"^chunk_samples: a stream of {total} codec frames"):
            resumed.next_plan(total, True)


@pytest.mark.parametrize("total", [0, 5, 2**31])
def test_a_chunk_that_ends_in_a_block_ended_its_stream(total):
    resumed = ChunkPlanner(SynthesisConfig(), GEOMETRY, delivered=[BLOCK, BLOCK + 1])
    assert resumed.next_plan(total, False) is None
    with pytest.raises(InvalidRequestError, match=r"was not cut into 2 chunks of 25 together"):
        resumed.next_plan(total, True)
    resumed = ChunkPlanner(SynthesisConfig(), GEOMETRY, delivered=[BLOCK, BLOCK + 1])
    assert resumed.next_plan(2 * BLOCK + 1, True) is None
    assert resumed.finished


@pytest.mark.parametrize(
    ("cut", "problem"),
    [
        ({"delivered": [BLOCK + 1, BLOCK]}, r"chunk_samples\[0\]: a chunk of 13 codec frames"),
        ({"delivered": [0, BLOCK]}, r"chunk_samples\[0\]: a chunk of 0 codec frames"),
        ({"delivered": [BLOCK, 0]}, r"chunk_samples\[1\]: the chunk is empty"),
        ({"sizes": [BLOCK + 1]}, r"chunk_frames\[0\]: .* 12 \(a block\) up to 96"),
        ({"sizes": [BLOCK, 9 * BLOCK]}, r"chunk_frames\[1\]: .* 12 \(a block\) up to 96"),
        ({"sizes": [BLOCK, BLOCK, 0]}, r"chunk_frames\[2\]: .* 12 \(a block\) up to 96"),
        ({"sizes": [2**31 - 8]}, r"chunk_frames\[0\]: .* 12 \(a block\) up to 96"),
    ],
)
def test_no_stream_is_or_was_cut_like_that(cut, problem):
    with pytest.raises(InvalidRequestError, match=f"^{problem}"):
        ChunkPlanner(SynthesisConfig(), GEOMETRY, **cut)


def test_sizes_of_chunks_are_whole_codec_frames():
    assert GEOMETRY.codec_frames([480, 0, 5760]) == [1, 0, 12]
    with pytest.raises(
        InvalidRequestError, match=r"^chunk_samples\[1\]: 481 is not a multiple of a codec frame's 480"
    ):
        GEOMETRY.codec_frames([480, 481])
    trimmed = replace(GEOMETRY, trimmed_samples=200)
    assert trimmed.codec_frames([280, 480, 5760]) == [1, 1, 12]
    assert trimmed.codec_frames([0]) == [0]
    with pytest.raises(InvalidRequestError, match=r"chunk_samples\[0\]: 480 "):
        trimmed.codec_frames([480])


@pytest.mark.parametrize("total", [0, 100])
def test_an_offline_stream_was_delivered_or_was_not(total):
    offline = partial(ChunkPlanner, SynthesisConfig(), GEOMETRY, streaming=False)
    delivered = offline(delivered=[total])
    assert delivered.next_plan(total, False) is None
    assert delivered.next_plan(total, True) is None
    assert delivered.finished
    with pytest.raises(InvalidRequestError, match=r"^chunk_samples: a stream of mode offline has no 2"):
        offline(delivered=[50, 50])
    with pytest.raises(InvalidRequestError, match=r"^chunk_samples: a stream of 99 codec frames was not"):
        offline(delivered=[total]).next_plan(99, True)
    with pytest.raises(InvalidRequestError, match=r"^chunk_frames: an answer in one piece"):
        offline(sizes=[BLOCK])


def test_first_chunk_needs_its_block_and_look_ahead_only():
    """It is never larger, and nobody is asked, however much is there."""
    planner = ChunkPlanner(SynthesisConfig(), GEOMETRY)
    assert planner.next_plan(2 * BLOCK - 1, False) is None
    plan = planner.next_plan(2 * BLOCK, False)
    assert plan is not None
    assert (plan.window_end, plan.target_end, plan.is_last) == (2 * BLOCK, BLOCK, False)
    plan = ChunkPlanner(SynthesisConfig(), GEOMETRY).next_plan(20 * BLOCK, True)
    assert plan is not None
    assert plan.target_end == BLOCK


def test_a_short_stream_is_one_chunk_without_context():
    for length in (1, BLOCK, 2 * BLOCK - 1):
        planner = ChunkPlanner(SynthesisConfig(), GEOMETRY)
        assert planner.next_plan(length, True) == ChunkPlan(0, 0, length, length, True)


def test_a_stream_may_end_in_the_look_ahead_while_it_waits():
    """The chunk that could have been cut becomes the last one, with the rest."""

    def wait(sizes: Sequence[int], may_wait: bool) -> int:
        return 0 if may_wait else sizes[-1]

    planner = ChunkPlanner(SynthesisConfig(), GEOMETRY)
    assert planner.next_plan(2 * BLOCK, False, wait) is not None
    assert planner.next_plan(3 * BLOCK + 5, False, wait) is None
    assert planner.next_plan(3 * BLOCK + 5, True, wait) == ChunkPlan(1, BLOCK, 41, 41, True)
    assert planner.finished


def test_offline_waits_for_the_end_and_refuses_what_is_too_long():
    planner = ChunkPlanner(SynthesisConfig(), GEOMETRY, streaming=False)
    assert planner.next_plan(1200, False) is None
    assert planner.next_plan(1200, True) == ChunkPlan(0, 0, 1200, 1200, True)
    assert planner.finished
    with pytest.raises(InvalidRequestError, match=r"2402 mel frames.*max_position_embeddings"):
        ChunkPlanner(SynthesisConfig(), GEOMETRY, streaming=False).next_plan(1201, True)


def test_a_stream_without_codes_ends_without_chunks():
    for streaming in (True, False):
        planner = ChunkPlanner(SynthesisConfig(), GEOMETRY, streaming=streaming)
        assert planner.next_plan(0, False) is None
        assert not planner.finished
        assert planner.next_plan(0, True) is None
        assert planner.finished


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"block_size": 25}, "block_size 25"),
        ({"unit_samples": 0}, "0 samples"),
        ({"trimmed_samples": 480}, "no sound"),
    ],
)
def test_refuses_impossible_settings_and_blocks_that_split_a_code(values, problem):
    with pytest.raises(CheckpointError, match=problem):
        replace(GEOMETRY, **values)

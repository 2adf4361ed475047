from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import CheckpointError, ConfigError, InvalidRequestError
from services.token2wav.chunks import ChunkingConfig, ChunkPlan, ChunkPlanner, CodecGeometry

GEOMETRY = CodecGeometry(block_size=24, repeats=2, max_frames=2400)
BLOCK = GEOMETRY.codes_per_block


@st.composite
def configs(draw) -> ChunkingConfig:
    first = draw(st.integers(1, 3))
    return ChunkingConfig(
        first_blocks=first,
        growth=draw(st.integers(1, 3)),
        max_blocks=draw(st.integers(first, 8)),
        look_ahead_blocks=draw(st.integers(0, 2)),
    )


def run(
    planner: ChunkPlanner, arrivals: list[int], announce_late: bool = False
) -> list[tuple[ChunkPlan, int]]:
    """All plans, each with the number of ids received when it was made."""
    plans, received = [], 0
    for index, arrival in enumerate(arrivals):
        received += arrival
        final = index == len(arrivals) - 1 and not announce_late
        while (plan := planner.next_plan(received, final)) is not None:
            plans.append((plan, received))
    while (plan := planner.next_plan(received, True)) is not None:
        plans.append((plan, received))
    return plans


arrival_patterns = st.lists(st.integers(0, 40), max_size=20)


@given(config=configs(), arrivals=arrival_patterns, announce_late=st.booleans())
@settings(deadline=None, max_examples=300)
def test_targets_tile_the_stream(config, arrivals, announce_late):
    planner = ChunkPlanner(config, GEOMETRY)
    plans = run(planner, arrivals, announce_late)
    total = sum(arrivals)
    position = 0
    for index, (plan, received) in enumerate(plans):
        assert plan.index == index
        assert plan.start == position < plan.target_end
        assert plan.target_end <= plan.window_end <= received
        assert plan.start % BLOCK == 0
        assert plan.is_last == (index == len(plans) - 1)
        if not plan.is_last:
            assert plan.window_end - plan.target_end == config.look_ahead_blocks * BLOCK
        position = plan.target_end
    assert position == total
    assert planner.finished
    assert (not plans) == (total == 0)


@given(config=configs(), arrivals=arrival_patterns, announce_late=st.booleans())
@settings(deadline=None, max_examples=200)
def test_cuts_do_not_depend_on_arrival(config, arrivals, announce_late):
    piecemeal = [plan for plan, _ in run(ChunkPlanner(config, GEOMETRY), arrivals, announce_late)]
    at_once = [plan for plan, _ in run(ChunkPlanner(config, GEOMETRY), [sum(arrivals)])]
    assert piecemeal == at_once


@given(config=configs(), total=st.integers(1, 500), data=st.data())
@settings(deadline=None, max_examples=200)
def test_a_resumed_stream_is_cut_as_before(config, total, data):
    """And makes all chunks again, or none at all if none is left."""
    plans = [plan for plan, _ in run(ChunkPlanner(config, GEOMETRY), [total])]
    delivered = data.draw(st.integers(0, len(plans)))
    resumed = ChunkPlanner(config, GEOMETRY, resume_from=delivered)
    again = [plan for plan, _ in run(resumed, [total])]
    assert resumed.finished
    expected = [replace(plan, delivered=plan.index < delivered) for plan in plans]
    assert again == (expected if delivered < len(plans) else [])


@given(config=configs(), total=st.integers(0, 500), more=st.one_of(st.integers(1, 20), st.just(2**31)))
@settings(deadline=None, max_examples=200)
def test_a_stream_cannot_have_delivered_more_chunks_than_it_has(config, total, more):
    # A stream without ids is one empty chunk of audio.
    chunks = max(1, len(run(ChunkPlanner(config, GEOMETRY), [total])))
    resumed = ChunkPlanner(config, GEOMETRY, resume_from=chunks + more)
    while (plan := resumed.next_plan(total, False)) is not None:
        assert plan.delivered
    with pytest.raises(InvalidRequestError, match=f"^chunks_delivered: a stream of {total} codec ids"):
        resumed.next_plan(total, True)


@pytest.mark.parametrize("total", [0, 100])
def test_an_offline_stream_was_delivered_or_was_not(total):
    config = ChunkingConfig(mode="offline")
    delivered = ChunkPlanner(config, GEOMETRY, resume_from=1)
    assert delivered.next_plan(total, False) is None
    assert delivered.next_plan(total, True) is None
    assert delivered.finished
    with pytest.raises(InvalidRequestError, match=r"^chunks_delivered: a stream of mode offline has no 2"):
        ChunkPlanner(config, GEOMETRY, resume_from=2)


def test_default_starts_small_and_grows():
    plans = [plan for plan, _ in run(ChunkPlanner(ChunkingConfig(), GEOMETRY), [40 * BLOCK])]
    sizes = [(plan.target_end - plan.start) // BLOCK for plan in plans]
    assert sizes[:6] == [1, 2, 4, 8, 8, 8]
    assert sum(sizes) == 40


def test_first_chunk_needs_its_block_and_look_ahead_only():
    planner = ChunkPlanner(ChunkingConfig(), GEOMETRY)
    assert planner.next_plan(2 * BLOCK - 1, False) is None
    plan = planner.next_plan(2 * BLOCK, False)
    assert plan is not None
    assert (plan.window_end, plan.target_end, plan.is_last) == (2 * BLOCK, BLOCK, False)


def test_a_short_stream_is_one_chunk_without_context():
    for length in (1, BLOCK, 2 * BLOCK - 1):
        planner = ChunkPlanner(ChunkingConfig(), GEOMETRY)
        assert planner.next_plan(length, True) == ChunkPlan(0, 0, length, length, True)


def test_offline_waits_for_the_end_and_refuses_what_is_too_long():
    planner = ChunkPlanner(ChunkingConfig(mode="offline"), GEOMETRY)
    assert planner.next_plan(1200, False) is None
    assert planner.next_plan(1200, True) == ChunkPlan(0, 0, 1200, 1200, True)
    assert planner.finished
    with pytest.raises(InvalidRequestError, match=r"2402 mel frames.*max_position_embeddings"):
        ChunkPlanner(ChunkingConfig(mode="offline"), GEOMETRY).next_plan(1201, True)


def test_a_stream_without_codes_ends_without_chunks():
    for mode in ("stream", "offline"):
        planner = ChunkPlanner(ChunkingConfig(mode=mode), GEOMETRY)
        assert planner.next_plan(0, False) is None
        assert not planner.finished
        assert planner.next_plan(0, True) is None
        assert planner.finished


@pytest.mark.parametrize(
    "values",
    [{"first_blocks": 0}, {"growth": 0}, {"max_blocks": 0}, {"look_ahead_blocks": -1}, {"mode": "x"}],
)
def test_refuses_impossible_settings(values):
    with pytest.raises(ConfigError):
        ChunkingConfig(**values)


def test_refuses_blocks_that_split_a_code():
    with pytest.raises(CheckpointError, match="block_size 25"):
        CodecGeometry(block_size=25, repeats=2, max_frames=100)

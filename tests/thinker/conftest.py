"""Thinkers with real engines, which live as long as the session."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.thinker.media.decoder import MediaDecoder
from tests.support.decoding import decoding
from tests.support.edges import MakeEdge
from tests.support.thinking import MakeThinker, ThinkerRig, fresh, kept_thinkers

BLOCK_SIZE = 32
BLOCK_BYTES = 3 * BLOCK_SIZE * 512
"""A block of the tiny thinker: two layers of keys and values, and the rows, 512 bytes a position each."""
TIGHT_BLOCKS = 14


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    with decoding() as decoder:
        yield decoder


@pytest.fixture(scope="session")
def make_thinker(make_edge: MakeEdge) -> MakeThinker:
    """Make thinkers; they are kept, for an engine that is collected takes vLLM's process groups with it."""
    kept: list[ThinkerRig] = []

    def make(model: Path, **engine: Any) -> ThinkerRig:
        kept.append(ThinkerRig(model, make_edge, **engine))
        return kept[-1]

    return make


@pytest.fixture(scope="session")
def kept_thinker(make_edge: MakeEdge) -> Iterator[MakeThinker]:
    """Gives the session's thinker of a kind."""
    yield from kept_thinkers(make_edge)


@pytest.fixture
def thinker(tiny_checkpoint: Path, kept_thinker: MakeThinker) -> Iterator[ThinkerRig]:
    """A thinker with room for everything."""
    yield from fresh(kept_thinker(tiny_checkpoint))


@pytest.fixture
def chunked_thinker(tiny_checkpoint: Path, kept_thinker: MakeThinker) -> Iterator[ThinkerRig]:
    """A thinker that computes at most 48 tokens in a step, in blocks of 32 positions."""
    yield from fresh(kept_thinker(tiny_checkpoint, block_size=BLOCK_SIZE, max_num_batched_tokens=48))


@pytest.fixture(params=[True, False], ids=["caching", "not caching"])
def tight_thinker(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, kept_thinker: MakeThinker
) -> Iterator[ThinkerRig]:
    """A thinker whose KV cache is too small for several long requests; with and without prefix caching."""
    rig = kept_thinker(
        tiny_checkpoint,
        block_size=BLOCK_SIZE,
        max_model_len=320,
        enable_prefix_caching=request.param,
        kv_cache_memory_bytes=(TIGHT_BLOCKS + 1) * BLOCK_BYTES,
    )
    # One block is vLLM's null block.
    assert rig.steps.blocks == TIGHT_BLOCKS
    yield from fresh(rig)


@pytest.fixture
def single_thinker(tiny_checkpoint: Path, kept_thinker: MakeThinker) -> Iterator[ThinkerRig]:
    """A thinker that serves one request at a time."""
    yield from fresh(kept_thinker(tiny_checkpoint, max_num_seqs=1))


@pytest.fixture
def other_thinker(other_checkpoint: Path, kept_thinker: MakeThinker) -> Iterator[ThinkerRig]:
    """A thinker of other sizes, which computes at most 100 tokens in a step."""
    yield from fresh(kept_thinker(other_checkpoint, block_size=BLOCK_SIZE, max_num_batched_tokens=100))


@pytest.fixture
def half_thinker(tiny_checkpoint: Path, kept_thinker: MakeThinker) -> Iterator[ThinkerRig]:
    """A thinker in bfloat16."""
    yield from fresh(kept_thinker(tiny_checkpoint, dtype="bfloat16"))

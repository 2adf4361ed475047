"""Thinkers with real engines, which live as long as the session."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.edges import MakeEdge
from tests.support.thinking import ThinkerRig

BLOCK_SIZE = 32
BLOCK_BYTES = 3 * BLOCK_SIZE * 512
"""A block of the tiny thinker: two layers of keys and values, and the rows, 512 bytes a position each."""
TIGHT_BLOCKS = 14


def fresh(rig: ThinkerRig) -> Iterator[ThinkerRig]:
    """A rig with nothing in it, before and after a test."""
    rig.forget()
    yield rig
    for request_id in rig.service.active_requests():
        rig.service.abort(request_id)
    while rig.service.ready:
        rig.step()


MakeThinker = Callable[..., ThinkerRig]


@pytest.fixture(scope="session")
def make_thinker(make_edge: MakeEdge) -> MakeThinker:
    """Make thinkers; they are kept, for an engine that is collected takes vLLM's process groups with it."""
    kept: list[ThinkerRig] = []

    def make(model: Path, **engine: Any) -> ThinkerRig:
        kept.append(ThinkerRig(model, make_edge, **engine))
        return kept[-1]

    return make


@pytest.fixture(scope="session")
def _plain(tiny_checkpoint: Path, make_edge: MakeEdge) -> Iterator[ThinkerRig]:
    rig = ThinkerRig(tiny_checkpoint, make_edge)
    yield rig
    rig.service._grammars.close()


@pytest.fixture
def thinker(_plain: ThinkerRig) -> Iterator[ThinkerRig]:
    """A thinker with room for everything."""
    yield from fresh(_plain)


@pytest.fixture(scope="session")
def _chunked(tiny_checkpoint: Path, make_edge: MakeEdge) -> ThinkerRig:
    return ThinkerRig(tiny_checkpoint, make_edge, block_size=BLOCK_SIZE, max_num_batched_tokens=48)


@pytest.fixture
def chunked_thinker(_chunked: ThinkerRig) -> Iterator[ThinkerRig]:
    """A thinker that computes at most 48 tokens in a step, in blocks of 32 positions."""
    yield from fresh(_chunked)


@pytest.fixture(scope="session")
def _tight(tiny_checkpoint: Path, make_edge: MakeEdge) -> dict[bool, ThinkerRig]:
    rigs = {
        caching: ThinkerRig(
            tiny_checkpoint,
            make_edge,
            block_size=BLOCK_SIZE,
            max_model_len=320,
            enable_prefix_caching=caching,
            kv_cache_memory_bytes=(TIGHT_BLOCKS + 1) * BLOCK_BYTES,
        )
        for caching in (True, False)
    }
    # One block is vLLM's null block.
    assert {rig.steps.blocks for rig in rigs.values()} == {TIGHT_BLOCKS}
    return rigs


@pytest.fixture(params=[True, False], ids=["caching", "not caching"])
def tight_thinker(request: pytest.FixtureRequest, _tight: dict[bool, ThinkerRig]) -> Iterator[ThinkerRig]:
    """A thinker whose KV cache is too small for several long requests; with and without prefix caching."""
    yield from fresh(_tight[request.param])


@pytest.fixture(scope="session")
def _single(tiny_checkpoint: Path, make_edge: MakeEdge) -> ThinkerRig:
    return ThinkerRig(tiny_checkpoint, make_edge, max_num_seqs=1)


@pytest.fixture
def single_thinker(_single: ThinkerRig) -> Iterator[ThinkerRig]:
    """A thinker that serves one request at a time."""
    yield from fresh(_single)


@pytest.fixture(scope="session")
def _other(other_checkpoint: Path, make_edge: MakeEdge) -> ThinkerRig:
    return ThinkerRig(other_checkpoint, make_edge, block_size=BLOCK_SIZE, max_num_batched_tokens=100)


@pytest.fixture
def other_thinker(_other: ThinkerRig) -> Iterator[ThinkerRig]:
    """A thinker of other sizes, which computes at most 100 tokens in a step."""
    yield from fresh(_other)


@pytest.fixture(scope="session")
def _half(tiny_checkpoint: Path, make_edge: MakeEdge) -> ThinkerRig:
    return ThinkerRig(tiny_checkpoint, make_edge, dtype="bfloat16")


@pytest.fixture
def half_thinker(_half: ThinkerRig) -> Iterator[ThinkerRig]:
    """A thinker in bfloat16."""
    yield from fresh(_half)

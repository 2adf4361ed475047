"""Talkers with real engines, which live as long as the session."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.answers import CODEC_ENDS, Reference
from tests.support.edges import MakeEdge
from tests.support.talking import TalkerRig
from tests.support.thinking import fresh

BLOCK_SIZE = 32
BLOCK_BYTES = 3 * BLOCK_SIZE * 512
"""A block of the tiny talker: two layers of keys and values, and the rows, 512 bytes a position each."""
TIGHT_BLOCKS = 14
CODEC_START = 8293


MakeTalker = Callable[..., TalkerRig]


@pytest.fixture(scope="session")
def kept_talker(make_edge: MakeEdge) -> MakeTalker:
    """Gives the session's talker of a kind."""
    return cache(lambda model, **engine: TalkerRig(model, make_edge, **engine))


@pytest.fixture(scope="session")
def plain_talker(tiny_checkpoint: Path, kept_talker: MakeTalker) -> TalkerRig:
    """A talker with room for everything; tests of one example take ``talker``."""
    return kept_talker(tiny_checkpoint)


@pytest.fixture
def talker(plain_talker: TalkerRig) -> Iterator[TalkerRig]:
    """A talker with room for everything."""
    yield from fresh(plain_talker)


@pytest.fixture
def tight_talker(tiny_checkpoint: Path, kept_talker: MakeTalker) -> Iterator[TalkerRig]:
    """A talker whose KV cache is too small for several requests, and which computes 96 tokens a step."""
    rig = kept_talker(
        tiny_checkpoint,
        block_size=BLOCK_SIZE,
        max_model_len=320,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=(TIGHT_BLOCKS + 1) * BLOCK_BYTES,
    )
    # One block is vLLM's null block.
    assert rig.steps.blocks == TIGHT_BLOCKS
    yield from fresh(rig)


@pytest.fixture
def other_talker(other_checkpoint: Path, kept_talker: MakeTalker) -> Iterator[TalkerRig]:
    """A talker of other sizes, which computes at most 100 tokens in a step."""
    yield from fresh(kept_talker(other_checkpoint, block_size=BLOCK_SIZE, max_num_batched_tokens=100))


@pytest.fixture
def pair_talker(tiny_checkpoint: Path, kept_talker: MakeTalker) -> Iterator[TalkerRig]:
    """A talker with places for two requests."""
    yield from fresh(kept_talker(tiny_checkpoint, max_num_seqs=2))


@pytest.fixture
def half_talker(tiny_checkpoint: Path, kept_talker: MakeTalker) -> Iterator[TalkerRig]:
    """A talker in bfloat16."""
    yield from fresh(kept_talker(tiny_checkpoint, dtype="bfloat16"))


@pytest.fixture(scope="session")
def odd_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with a talker that likes best what it must not draw, and ends by the pad token."""
    directory = tmp_path_factory.mktemp("checkpoint") / "odd"
    shutil.copytree(tiny_checkpoint, directory)
    weights = load_file(directory / "model.safetensors")
    head = weights["talker.codec_head.weight"]
    pad, end = CODEC_ENDS
    head[[pad, end]] = head[[end, pad]]
    # The last dimension of the residual stream is one everywhere (checkpoint/weights.py).
    for ids, liking in ((_not_in_the_table(directory), 500), ([CODEC_START], 1000)):
        head[ids] = 0
        head[ids, -1] = liking
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def odd_reference(odd_checkpoint: Path) -> Reference:
    """transformers, with the odd checkpoint's weights."""
    reference = Reference(odd_checkpoint)
    reference.undrawable = _not_in_the_table(odd_checkpoint)
    return reference


@pytest.fixture
def odd_talker(odd_checkpoint: Path, kept_talker: MakeTalker) -> Iterator[TalkerRig]:
    """A talker that likes best what it must not draw, and ends by the pad token."""
    yield from fresh(kept_talker(odd_checkpoint))


def _not_in_the_table(checkpoint: Path) -> list[int]:
    """Codec ids that the DiT has no embedding for, without the special ones; its table has a row to spare."""
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    first = config["token2wav_config"]["dit_config"]["num_embeds"] + 1
    special = {*CODEC_ENDS, CODEC_START}
    return [code for code in range(first, config["talker_config"]["vocab_size"]) if code not in special]

"""A tiny random checkpoint of Qwen3-Omni, and transformers with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.distributed import parallel_state

from checkpoint.qwen3_omni import write_qwen3_omni
from services.families.qwen3_omni.thinker import THINKER
from tests.qwen3_omni.tiny import Reference
from tests.support.edges import MakeEdge
from tests.support.thinking import MakeThinker, ThinkerRig, fresh, kept_thinkers


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3") / "checkpoint"
    write_qwen3_omni(directory)
    return directory


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="session")
def experts() -> None:
    """Make the experts' group of processes: vLLM does with a process's first engine, which may have none."""
    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        backend = torch.distributed.get_backend(parallel_state.get_world_group().device_group)
        group = parallel_state.init_model_parallel_group([[0]], 0, backend, group_name="ep")
        parallel_state._EP = group


@pytest.fixture(scope="session")
def make_thinker(experts: None, make_edge: MakeEdge) -> Iterator[MakeThinker]:
    """Gives the session's thinker of a kind."""
    yield from kept_thinkers(make_edge, family=THINKER, max_model_len=1024)


@pytest.fixture
def thinker(checkpoint: Path, make_thinker: MakeThinker) -> Iterator[ThinkerRig]:
    yield from fresh(make_thinker(checkpoint))


@pytest.fixture
def chunked(checkpoint: Path, make_thinker: MakeThinker) -> Iterator[ThinkerRig]:
    """A thinker that computes at most 48 tokens in a step."""
    yield from fresh(make_thinker(checkpoint, block_size=32, max_num_batched_tokens=48))

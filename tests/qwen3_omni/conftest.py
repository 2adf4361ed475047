"""A tiny random checkpoint of Qwen3-Omni, and transformers with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state

from checkpoint.qwen3_omni import write_qwen3_omni
from services.families.qwen3_omni.thinker.family import THINKER
from tests.qwen3_omni.tiny import Reference
from tests.support.edges import MakeEdge
from tests.support.thinking import ThinkerRig


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


def fresh(rig: ThinkerRig) -> Iterator[ThinkerRig]:
    rig.forget()
    yield rig
    for request_id in rig.service.active_requests():
        rig.service.abort(request_id)


@pytest.fixture(scope="session")
def engines() -> Iterator[list[ThinkerRig]]:
    """Keeps what a test has made: an engine that is collected takes vLLM's process groups with it."""
    kept: list[ThinkerRig] = []
    yield kept
    for rig in kept:
        rig.service._grammars.close()
        rig.service._preparer.close()


@pytest.fixture(scope="session")
def _thinker(experts: None, checkpoint: Path, make_edge: MakeEdge) -> Iterator[ThinkerRig]:
    rig = ThinkerRig(checkpoint, make_edge, family=THINKER, max_model_len=1024)
    yield rig
    rig.service._grammars.close()
    rig.service._preparer.close()


@pytest.fixture
def thinker(_thinker: ThinkerRig) -> Iterator[ThinkerRig]:
    yield from fresh(_thinker)


@pytest.fixture(scope="session")
def _chunked(experts: None, checkpoint: Path, make_edge: MakeEdge) -> Iterator[ThinkerRig]:
    pieces: Any = {"block_size": 32, "max_num_batched_tokens": 48}
    rig = ThinkerRig(checkpoint, make_edge, family=THINKER, max_model_len=1024, **pieces)
    yield rig
    rig.service._grammars.close()
    rig.service._preparer.close()


@pytest.fixture
def chunked(_chunked: ThinkerRig) -> Iterator[ThinkerRig]:
    """A thinker that computes at most 48 tokens in a step."""
    yield from fresh(_chunked)

"""Fixtures that several test packages need."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zmq
from hypothesis import HealthCheck, settings

import checkpoint
from checkpoint import TINY, write_checkpoint
from checkpoint.compact import expand
from shared.config import ThinkerConfig
from shared.vllm.environment import prepare_environment
from tests.support.edges import Edge, MakeEdge

# Hooks: pytest calls them by their names.
from tests.support.plugins import (  # noqa: F401
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_exception_interact,
    pytest_runtest_protocol,
    pytest_xdist_make_scheduler,
)

if TYPE_CHECKING:
    from tests.support.answers import Reference
    from tests.support.conversations import Processor

# A shell that runs the tests in the background, or nohup, has these ignored, and so would their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# How long an example takes says something of the machine, and nothing of the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# Before any test module imports vLLM, or something of transformers that imports torchvision.
prepare_environment(ThinkerConfig(threads=1))
# PyTorch has read its number at the imports above.  More threads would wait in loops for cores that stages
# have: some tests took seven times as long.
torch.set_num_threads(1)

_LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 6}
OTHER_SHAPE = replace(
    TINY,
    thinker={**TINY.thinker, **_LAYERS, "hidden_size": 192, "num_key_value_heads": 1},
    talker={**TINY.talker, **_LAYERS, "hidden_size": 112, "num_key_value_heads": 3, "head_dim": 64},
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let engines go with the process."""
    core: Any = sys.modules.get("vllm.v1.engine.core")
    if core is not None:
        # The end of one would take the process groups from the others, and collect all garbage for seconds.
        core.cleanup_dist_env_and_memory = lambda: None


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny checkpoint with seed 0; tests must not write into it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(directory)
    return directory


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a checkpoint of other sizes, with another seed; tests must not write into it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "other"
    write_checkpoint(directory, OTHER_SHAPE, seed=7)
    return directory


@pytest.fixture(scope="session")
def speaking_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the trained checkpoint that the package brings; tests must not write into it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "speaking"
    expand(Path(checkpoint.__file__).parent / "speaking", directory)
    return directory


@pytest.fixture(scope="session")
def reference(tiny_checkpoint: Path) -> Reference:
    """transformers, with the tiny checkpoint's weights."""
    from tests.support.answers import Reference  # noqa: PLC0415 - loads transformers

    return Reference(tiny_checkpoint)


@pytest.fixture(scope="session")
def processor(tiny_checkpoint: Path) -> Processor:
    """transformers' processor of the tiny checkpoint."""
    from tests.support.conversations import Processor  # noqa: PLC0415 - loads transformers

    return Processor(tiny_checkpoint)


@pytest.fixture(scope="session")
def other_reference(other_checkpoint: Path) -> Reference:
    """transformers, with the other checkpoint's weights."""
    from tests.support.answers import Reference  # noqa: PLC0415 - loads transformers

    return Reference(other_checkpoint)


@pytest.fixture(scope="session")
def make_edge() -> Iterator[MakeEdge]:
    """Makes edges that live as long as the session: engines are never destroyed before it ends."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    edges: list[Edge[Any]] = []

    def make(union: Any) -> Edge[Any]:
        edges.append(Edge(context, union))
        return edges[-1]

    yield make
    for edge in edges:
        edge.close()
    context.term()

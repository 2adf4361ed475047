"""Fixtures that several test packages need."""

from pathlib import Path

import pytest

from checkpoint import write_checkpoint
from shared.config import ThinkerConfig
from shared.engine.environment import prepare_environment

# Before any test module imports vLLM, or something of transformers that imports torchvision.
prepare_environment(ThinkerConfig(threads=1))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny checkpoint with seed 0; tests must not write into it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(directory)
    return directory

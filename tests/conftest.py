"""Fixtures that several test packages need."""

from pathlib import Path

import pytest

from checkpoint import write_checkpoint
from shared.engine.torchvision_compat import declare_missing_operators

# Before any test module imports something of transformers that imports torchvision.
declare_missing_operators()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny checkpoint with seed 0; tests must not write into it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint(directory)
    return directory

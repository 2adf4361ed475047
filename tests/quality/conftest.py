"""The trained checkpoint that the package brings, as the stages load it."""

from pathlib import Path

import pytest

import checkpoint
from checkpoint.compact import expand


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the speaking checkpoint; tests must not write into it."""
    directory = tmp_path_factory.mktemp("checkpoint") / "speaking"
    expand(Path(checkpoint.__file__).parent / "speaking", directory)
    return directory

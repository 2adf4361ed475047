"""The stack that speaks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.restarting import RestartingStack


@pytest.fixture(scope="session")
def stack(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartingStack]:
    """The trained checkpoint in processes of their own, which can be killed one by one."""
    with RestartingStack(speaking_checkpoint, tmp_path_factory.mktemp("speaking")) as stack:
        yield stack

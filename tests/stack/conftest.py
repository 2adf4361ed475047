"""The stack on the tiny checkpoint, started once for all tests that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stack import RunningStack, make_config


@pytest.fixture(scope="session")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with RunningStack(make_config(tiny_checkpoint), tmp_path_factory.mktemp("stack")) as running:
        yield running

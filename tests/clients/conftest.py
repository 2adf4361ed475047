"""One stack for all programs, with the trained checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.running import Programs
from tests.support.stack import PATIENT, RunningStack, make_config


@pytest.fixture(scope="session")
def stack(speaking_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    config = make_config(speaking_checkpoint, gateway=PATIENT)
    with RunningStack(config, tmp_path_factory.mktemp("clients")) as stack:
        yield stack


@pytest.fixture
def programs(stack: RunningStack, speaking_checkpoint: Path, tmp_path: Path) -> Programs:
    return Programs(stack.config["gateway"]["http"].replace("tcp", "http"), speaking_checkpoint, tmp_path)

"""The stack on the tiny checkpoint, started once for all tests that leave it as it was.

It tells its traces, so that every test is one of them too; the stacks that tests start for themselves do not.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.children import Folders
from tests.support.otlp import Collector
from tests.support.stack import PATIENT, RunningStack, make_config


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Takes the traces of the stack."""
    with Collector() as running:
        yield running


@pytest.fixture(scope="session")
def stack(tiny_checkpoint: Path, tmp_path_factory: Folders, collector: Collector) -> Iterator[RunningStack]:
    config = make_config(
        tiny_checkpoint,
        tracing={"endpoint": collector.url},
        # Losses have stacks of their own.
        gateway={**PATIENT, "webrtc": {"enabled": True, "addresses": ["127.0.0.1"]}},
    )
    directory = tmp_path_factory.mktemp("stack")
    with RunningStack(config, directory, OTEL_BSP_SCHEDULE_DELAY="100") as running:
        yield running

"""The stack and the real Prometheus, which reads all of its processes every second."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prometheus import Prometheus
from tests.support.stack import RunningStack, free_addresses, make_config
from tests.support.traffic import Traffic


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool."""
    found = shutil.which("promtool")
    assert found is not None, (
        "promtool is missing: run `make test-monitoring`, or install the package prometheus"
    )
    return found


@pytest.fixture(scope="session")
def stack(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    # Few places, so that the dashboard's picture shows requests that wait for one.
    config = make_config(tiny_checkpoint, gateway={"limits": {"max_active": 4}})
    with RunningStack(config, tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture(scope="session")
def prometheus(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Reads every process that has an endpoint."""
    sections = [stack.config["gateway"], *stack.config["stages"].values()]
    targets = [section["http"].removeprefix("tcp://") for section in sections]
    (address,) = free_addresses(1)
    with Prometheus(address, targets, tmp_path_factory.mktemp("prometheus")) as running:
        yield running


@pytest.fixture(scope="session")
def traffic(stack: RunningStack) -> Iterator[Traffic]:
    """Requests of all kinds, one after the other, as long as the tests run."""
    with Traffic(stack.address) as running:
        yield running

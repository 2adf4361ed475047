"""The stack and the real Prometheus, which reads all of its processes every second."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.bench import keys_file
from tests.support.monitoring import Prometheus
from tests.support.stack import PATIENT, RunningStack, free_addresses, make_config
from tests.support.traffic import Traffic

KEYS = {name: f"omr_key-of-{name}" for name in ("prometheus", "web", "app", "guest")}
"""API keys of those who ask the gateway."""


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
    directory = tmp_path_factory.mktemp("stack")
    limits = {"guest": {"requests_per_second": 0.3, "burst": 2}}
    keys = keys_file(
        directory / "keys.yaml", **{name: {"key": key, **limits.get(name, {})} for name, key in KEYS.items()}
    )
    # Few places, so that the dashboard's picture shows requests that wait for one.
    config = make_config(
        tiny_checkpoint, gateway={**PATIENT, "limits": {"max_active": 4}, "api_keys": str(keys)}
    )
    with RunningStack(config, directory) as running:
        yield running


@pytest.fixture(scope="session")
def prometheus(stack: RunningStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Reads every process that has an endpoint."""
    sections = [stack.config["gateway"], *stack.config["stages"].values()]
    targets = [section.get("monitor", section["http"]).removeprefix("tcp://") for section in sections]
    (address,) = free_addresses(1)
    directory = tmp_path_factory.mktemp("prometheus")
    with Prometheus(address, targets, directory, KEYS["prometheus"]) as running:
        yield running


@pytest.fixture(scope="session")
def traffic(stack: RunningStack) -> Iterator[Traffic]:
    """Requests of all kinds, one after the other, as long as the tests run."""
    with Traffic(stack.address, keys=[KEYS["web"]]) as running:
        yield running

"""Fixtures of the gateway's tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.config import Config
from tests.gateway.bench import make_config
from tests.gateway.checkpoint_dir import make_checkpoint_dir


@pytest.fixture(scope="session")
def checkpoint_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint_dir(tmp_path_factory.mktemp("gateway") / "checkpoint")


@pytest.fixture
def configure(checkpoint_dir: Path) -> Callable[..., Config]:
    def configured(
        gateway: dict[str, Any] | None = None, media: dict[str, Any] | None = None, **limits: Any
    ) -> Config:
        return make_config(checkpoint_dir, gateway, media, **limits)

    return configured

"""Fixtures of the tests of ``shared``."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from shared.config import Config
from shared.messages import Role
from shared.transport.curve import StackContext, open_context
from shared.transport.keys import make_keys
from tests.shared.support import Context, Open


@pytest.fixture
def context() -> Iterator[Context]:
    """A ZeroMQ context; sockets that a test leaves open are closed with it."""
    context = Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    make_keys(directory, replace=False)
    return directory


@pytest.fixture
def opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the contexts of processes; closes them with the test, and the sockets that it leaves open."""
    before = set(threading.enumerate())
    contexts: list[StackContext] = []
    made: list[zmq.Socket[bytes]] = []

    def keep(context: StackContext, kind: int) -> zmq.Socket[bytes]:
        made.append(zmq.Context.socket(context, kind))
        return made[-1]

    monkeypatch.setattr(StackContext, "socket", keep)

    def open_one(role: Role, keys: Path | None = directory, **security: Any) -> StackContext:
        section = {"keys": str(keys) if keys is not None else None, **security}
        contexts.append(open_context(Config.model_validate({"security": section}), role))
        return contexts[-1]

    yield open_one
    for context in contexts:
        context.destroy(linger=0)
    assert not [thread for thread in threading.enumerate() if thread.name == "curve" and thread not in before]

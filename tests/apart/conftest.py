"""A stack on five hosts, and what its answers should be: those of a stack on one."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnirelay import Client
from tests.apart.crowd import ANSWERS_S
from tests.apart.network import Network
from tests.apart.stack import NAMES, ApartStack
from tests.chaos.streams import Heard, Stream
from tests.support.children import Folders
from tests.support.processes import Processes
from tests.support.restarting import STREAMS
from tests.support.stack import make_config


@pytest.fixture(scope="session")
def undisturbed(tiny_checkpoint: Path, tmp_path_factory: Folders) -> list[Heard]:
    """The answers of a stack on one host, on the loopback and without keys."""
    with (
        Processes(make_config(tiny_checkpoint), tmp_path_factory.mktemp("alone")) as alone,
        Client(alone.start_all().address) as client,
    ):
        streams = [Stream(client, number) for number in range(STREAMS)]
        return [stream.result(time.monotonic() + ANSWERS_S) for stream in streams]


@pytest.fixture(scope="session")
def stack(undisturbed: list[Heard], tiny_checkpoint: Path, tmp_path_factory: Folders) -> Iterator[ApartStack]:
    """Each process on a host of its own; started when the stack on one host has ended."""
    del undisturbed
    with (
        Network(*NAMES) as network,
        ApartStack(tiny_checkpoint, tmp_path_factory.mktemp("apart"), network) as stack,
    ):
        yield stack

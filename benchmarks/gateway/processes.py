"""The processes of a measurement: a gateway, imitated stages and clients, each on cores of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import yaml

from benchmarks.adapters.omnirelay import free_addresses
from benchmarks.gateway.clients import Interface, Received
from benchmarks.gateway.stages import Sent
from omnirelay import Client
from omnirelay.errors import GatewayUnreachableError, OmniRelayError
from shared.config import Config
from shared.messages import STAGES

START_S: Final = 120.0
"""Time limit for a start, and for the end of a process that was told to end."""
POLL_S: Final = 0.05


@dataclass(frozen=True)
class Cores:
    """Which cores a process may use.

    Attributes:
        gateway: One core.
        stages: That of the imitated stages.
        clients: One for each process of clients.
    """

    gateway: int
    stages: int
    clients: tuple[int, ...]

    @classmethod
    def of_this_machine(cls) -> "Cores":
        """One core for the gateway, the others for those who use it; with fewer than four they share."""
        first, *others = sorted(os.sched_getaffinity(0))
        others = others or [first]
        return cls(first, others[0], tuple(others[1:]) or (others[0],))


def configuration(model: Path, streams: int, heartbeat_s: float = 0.5) -> Config:
    """Return the defaults, on free addresses, with room for so many streams.

    Args:
        model: Directory of the checkpoint.
        streams: How many.
        heartbeat_s: Interval of all stages; timeouts grow with it.
    """
    listen, events, control, http = free_addresses(4)
    room = 2 * streams + 16
    return Config.model_validate(
        {
            "model": str(model),
            "log_level": "error",
            "gateway": {
                "listen": listen,
                "events": events,
                "control": control,
                "http": http,
                "monitor": None,
                # All clients have one address; a proxy's connections have no share.
                "trusted_proxies": ["127.0.0.1"],
                "heartbeat_timeout_s": 3 * heartbeat_s,
                "orphan_timeout_s": 10 * heartbeat_s,
                "limits": {"max_active": room, "max_queued": room, "max_connections": room},
            },
            "stages": {stage: {"heartbeat_s": heartbeat_s} for stage in STAGES},
        }
    )


@dataclass(frozen=True)
class Running:
    """A gateway and its stages."""

    config: Config
    pids: dict[str, int]
    _sent: Path
    _stages: "subprocess.Popen[bytes]"

    def stop_stages(self) -> Sent:
        """End the stages, and return when they sent what."""
        self._stages.terminate()
        self._stages.wait(START_S)
        return msgspec.msgpack.decode(self._sent.read_bytes(), type=Sent)


@contextmanager
def running(config: Config, directory: Path, cores: Cores, replicas: int) -> Iterator[Running]:
    """Run a gateway with so many replicas of each stage, all ready.

    Raises:
        OmniRelayError: It did not start.
    """
    path, sent = directory / "omnirelay.yaml", directory / "sent"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)), encoding="utf-8")
    gateway = _start([sys.executable, "-m", "gateway", "--config", str(path)], cores.gateway)
    stages = _start(_module("stages", "--config", path, "--replicas", replicas, "--sent", sent), cores.stages)
    try:
        _wait_until_ready(config, replicas, (gateway, stages))
        yield Running(config, {"gateway": gateway.pid, "stages": stages.pid}, sent, stages)
    finally:
        for each in (gateway, stages):
            _end(each)


@contextmanager
def clients(
    running: Running,
    interface: Interface,
    cores: Cores,
    directory: Path,
    starts: Sequence[float],
    until: float,
) -> "Iterator[ClientProcesses]":
    """Hold streams that begin at these monotonic times, shared out among processes."""
    gateway = running.config.gateway
    address = gateway.listen if interface == "tcp" else str(gateway.http)
    model = Path(running.config.model or "").name
    shares = [starts[number :: len(cores.clients)] for number in range(len(cores.clients))]
    files = [directory / f"received{number}" for number, share in enumerate(shares) if share]
    processes = [
        _start(
            _module(
                *("clients", interface, address, "--model", model, "--until", until, "--received", file),
                *("--starts", *share),
            ),
            core,
        )
        for file, share, core in zip(files, filter(None, shares), cores.clients, strict=False)
    ]
    try:
        yield ClientProcesses(processes, files)
    finally:
        for each in processes:
            _end(each)


@dataclass(frozen=True)
class ClientProcesses:
    """The processes of clients."""

    processes: "list[subprocess.Popen[bytes]]"
    files: list[Path]

    def wait(self) -> Received:
        """Wait for their end, and return when they received what.

        Raises:
            OmniRelayError: A stream failed.
        """
        if any([each.wait(START_S) for each in self.processes]):
            raise OmniRelayError("a stream failed; its client's words are above")
        received: Received = {}
        for file in self.files:
            received |= msgspec.msgpack.decode(file.read_bytes(), type=Received)
        return received


def _module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gateway.{name}", *map(str, arguments)]


def _start(command: list[str], core: int) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMNI")}
    # The process inherits the cores of the thread that starts it, and so do all of its threads.
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        return subprocess.Popen(command, env=environment)  # noqa: S603 - our own modules
    finally:
        os.sched_setaffinity(0, before)


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait(START_S)


def _wait_until_ready(config: Config, replicas: int, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    late = time.monotonic() + START_S
    while time.monotonic() < late:
        if any(each.poll() is not None for each in processes):
            break
        try:
            with Client(config.gateway.listen) as client:
                stages = client.status().stages
        except GatewayUnreachableError:
            stages = []
        ready = [each for each in stages if each.state == "ready"]
        if len(ready) == 3 * replicas and all(each.replica is not None for each in ready):
            return
        time.sleep(POLL_S)
    raise OmniRelayError("the gateway and its imitated stages are not ready")

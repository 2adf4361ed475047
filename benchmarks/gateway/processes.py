"""The processes of a measurement: a gateway, imitated stages and clients, each on cores of its own."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import yaml

from benchmarks.adapters.omnirelay import configuration
from benchmarks.gateway.clients import Interface, Received
from benchmarks.gateway.stages import Sent
from omnirelay import Client
from omnirelay.errors import GatewayUnreachableError, OmniRelayError
from shared.config import Config
from shared.messages import STAGES

START_S: Final = 120.0
"""Time limit for a start, and for the end of a process."""
POLL_S: Final = 0.05
Process = subprocess.Popen[bytes]


def cores() -> tuple[int, int, tuple[int, ...]]:
    """Cores for the gateway, the imitated stages, and clients; with fewer than four they share."""
    first, *others = sorted(os.sched_getaffinity(0))
    others = others or [first]
    return first, others[0], tuple(others[1:]) or (others[0],)


def gateway_config(model: Path, streams: int, heartbeat_s: float = 0.5) -> Config:
    """Return the defaults with room for so many streams; timeouts grow with heartbeats."""
    values, room = configuration(model), 2 * streams + 16
    values["log_level"] = "error"
    values["gateway"] |= {
        "monitor": None,
        # All clients have one address; a proxy's connections have no share.
        "trusted_proxies": ["127.0.0.1"],
        "heartbeat_timeout_s": 3 * heartbeat_s,
        "orphan_timeout_s": 10 * heartbeat_s,
        "limits": {"max_active": room, "max_queued": room, "max_connections": room},
    }
    values["stages"] = {stage: {"heartbeat_s": heartbeat_s} for stage in STAGES}
    return Config.model_validate(values)


@dataclass(frozen=True)
class Running:
    """A gateway and its imitated stages; files of processes are in ``directory``."""

    config: Config
    directory: Path
    gateway: Process
    stages: Process

    def stop_stages(self) -> Sent:
        """End the stages, and return when they sent what."""
        self.stages.terminate()
        self.stages.wait(START_S)
        return msgspec.msgpack.decode((self.directory / "sent").read_bytes(), type=Sent)

    @contextmanager
    def clients(self, interface: Interface, starts: Sequence[float], until: float) -> Iterator[list[Process]]:
        """Hold streams that begin at these monotonic times, shared out among processes."""
        gateway = self.config.gateway
        address = gateway.listen if interface == "tcp" else str(gateway.http)
        given = ("--model", Path(self.config.model or "").name, "--until", until)
        _, _, free = cores()
        with ExitStack() as ending:
            processes = []
            for number, core in enumerate(free[: len(starts)]):
                file, share = self.directory / f"received{number}", starts[number :: len(free)]
                times = ("--received", file, "--starts", *share)
                processes.append(
                    _start(ending, core, "benchmarks.gateway.clients", interface, address, *given, *times)
                )
            yield processes

    def received(self, clients: Sequence[Process]) -> Received:
        """Wait for the end of clients, and return when they received what.

        Raises:
            OmniRelayError: A stream failed.
        """
        if any([each.wait(START_S) for each in clients]):
            raise OmniRelayError("a stream failed; its client's messages are above")
        received: Received = {}
        for number in range(len(clients)):
            file = self.directory / f"received{number}"
            received |= msgspec.msgpack.decode(file.read_bytes(), type=Received)
        return received


@contextmanager
def running(config: Config, directory: Path, replicas: int) -> Iterator[Running]:
    """Run a gateway with so many replicas of each stage, all ready.

    Raises:
        OmniRelayError: It did not start.
    """
    path = directory / "omnirelay.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_defaults=True)), encoding="utf-8")
    first, second, _ = cores()
    with ExitStack() as ending:
        gateway = _start(ending, first, "gateway", "--config", path)
        given = ("--config", path, "--replicas", replicas, "--sent", directory / "sent")
        stages = _start(ending, second, "benchmarks.gateway.stages", *given)
        _wait_until_ready(config, replicas, (gateway, stages))
        yield Running(config, directory, gateway, stages)


def _start(ending: ExitStack, core: int, module: str, *arguments: object) -> Process:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMNI")}
    # The process inherits the cores of the thread that starts it, and so do all of its threads.
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        process = subprocess.Popen(command, env=environment)  # noqa: S603 - our own modules
    finally:
        os.sched_setaffinity(0, before)
    ending.callback(process.wait, START_S)
    ending.callback(process.kill)
    return process


def _wait_until_ready(config: Config, replicas: int, processes: Sequence[Process]) -> None:
    late = time.monotonic() + START_S
    while time.monotonic() < late and all(each.poll() is None for each in processes):
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

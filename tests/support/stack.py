"""The whole stack in real processes, as ``omnirelay up`` starts it."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import yaml

from shared.config.gateway import PORTS_APART
from tests.support.ports import free_ports

START_S = 240.0
STOP_S = 60.0
COMMAND = str(Path(sys.executable).with_name("omnirelay"))
PATIENT: Final[dict[str, Any]] = {"heartbeat_timeout_s": 10.0}
"""A gateway's: other work may take the cores for longer than the default, and a test would see a loss."""


def inherited() -> dict[str, str]:
    """The test's own environment without what says anything to OmniRelay.

    Nor do its processes tell their coverage: a stage then takes 11 s of a core to start, not 6.5.
    """
    foreign = ("OMNI", "OTEL_", "COVERAGE_")
    return {key: value for key, value in os.environ.items() if not key.startswith(foreign)}


def free_addresses(count: int) -> list[str]:
    """Addresses on the loopback that nobody listens on."""
    return [f"tcp://127.0.0.1:{port}" for port in free_ports(count)]


def addresses_of_several() -> dict[str, str]:
    """Free addresses of a gateway; so are those 100 ports above, where a second one listens."""
    found: dict[str, str] = {}
    keys = ["listen", "events", "control", "http", "monitor"]
    while keys:
        (port,) = free_ports(1)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port + PORTS_APART))
            found[keys.pop()] = f"tcp://127.0.0.1:{port}"
    return found


def make_config(model: Path, **changes: Any) -> dict[str, Any]:
    """A configuration on free addresses; ``changes`` are merged in, section by section."""
    listen, events, control, api, monitor, *others = free_addresses(11)
    stages = ("thinker", "talker", "token2wav")
    addresses = zip(stages, others[:3], others[3:], strict=True)
    config: dict[str, Any] = {
        "model": str(model),
        "gateway": {"listen": listen, "events": events, "control": control, "http": api, "monitor": monitor},
        "stages": {name: {"inbox": inbox, "http": http, "threads": 1} for name, inbox, http in addresses},
    }
    return merge(config, changes)


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        known = merged.get(key)
        merged[key] = merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


class RunningStack:
    """``omnirelay up`` with a configuration of its own, from ready to stopped.

    Args:
        config: The configuration.
        directory: Where it is written to.
        environment: Variables beside those that are inherited.
    """

    def __init__(self, config: dict[str, Any], directory: Path, **environment: str) -> None:
        self.config = config
        self.address: str = config["gateway"]["listen"]
        self.output: list[str] = []
        self.path = directory / f"{self.address.rpartition(':')[2]}.yaml"
        self.path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.process = subprocess.Popen(
            [COMMAND, "up", "--config", str(self.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=inherited() | environment,
        )
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        ready = f"ready: {self.address}"
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: any(ready in line for line in self.output) or not self._reader.is_alive(), START_S
            )
        if not arrived or not any(ready in line for line in self.output):
            self.process.kill()
            raise AssertionError("the stack is not ready:\n" + "".join(self.output))

    def stop(self) -> float:
        """Ask it to stop; gives the seconds it took, and leaves no process."""
        started = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        finally:
            self.process.kill()
            self._reader.join(STOP_S)
            if self.process.stdout is not None:
                self.process.stdout.close()
        return time.monotonic() - started

    def _read(self) -> None:
        if self.process.stdout is None:
            return
        for line in self.process.stdout:
            with self._changed:
                self.output.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def omnirelay(
    *arguments: str, lines: str = "", timeout_s: float = 120.0
) -> "subprocess.CompletedProcess[str]":
    """Run the command line as a user does, with lines that come from a pipe."""
    return subprocess.run(
        [COMMAND, *arguments], input=lines, capture_output=True, text=True, timeout=timeout_s, check=False
    )

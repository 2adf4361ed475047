"""The processes of the stack, each started, stopped and killed by itself, as an orchestrator does."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml

from omnirelay import Client, StatusReport
from omnirelay.errors import GatewayUnreachableError
from shared.messages import STAGES
from tests.support.children import ROOT
from tests.support.stack import free_addresses, inherited

START_S = 240.0


def wait_until(condition: Callable[[], Any], what: str, within_s: float = START_S) -> float:
    """Wait for something; gives the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, f"{what} did not come true in {within_s} s"
        time.sleep(0.02)
    return time.monotonic() - began


class Processes:
    """Gateways and replicas of the stages.

    Args:
        config: The configuration; further replicas of a stage listen on ports of their own, and further
            gateways where ``gateway.others`` says, and on ports of their own for clients.
        directory: Where it is written to, and what the processes say.
    """

    def __init__(self, config: dict[str, Any], directory: Path) -> None:
        self.address: str = config["gateway"]["listen"]
        self.config = config
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._own: dict[str, dict[str, str]] = {}
        self._directory = directory
        self._path = directory / "config.yaml"
        self._path.write_text(yaml.safe_dump(config), encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()

    def start(self, name: str) -> None:
        """Start a process: ``gateway``, a stage, or one of these with a number behind, for a further one.

        Whatever is started under a name listens where the one before it did.
        """
        kind = name.partition(" ")[0].upper()
        section = kind if kind == "GATEWAY" else f"STAGES__{kind}"
        changes = {
            f"OMNIRELAY_{section}__{key.upper()}": address for key, address in self.addresses(name).items()
        }
        with (self._directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*self.prefix(name), sys.executable, "-m", *self.module(name), "--config", str(self._path)],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=inherited() | changes | self.environment(name),
            )

    def start_all(self) -> Self:
        """Start a gateway and the stages, and wait until they take requests."""
        for name in ("gateway", *STAGES):
            self.start(name)
        wait_until(self.ready, "the stack is ready")
        return self

    def module(self, name: str) -> list[str]:
        """What is run as a process: a module, and arguments before those that all have."""
        stage = name.partition(" ")[0]
        return [f"services.{stage}" if stage in STAGES else stage]

    def prefix(self, name: str) -> list[str]:
        """A program that runs a process, with its arguments, and becomes it."""
        del name
        return []

    def environment(self, name: str) -> dict[str, str]:
        """Variables for a process, beside the test's own."""
        del name
        return {}

    def addresses(self, name: str) -> dict[str, str]:
        """Where a process listens: ``inbox`` and ``http`` of a stage; all addresses of a further gateway."""
        stage, _, number = name.partition(" ")
        if stage == "gateway" and number:
            if name not in self._own:
                own = zip(("listen", "http", "monitor"), free_addresses(3), strict=True)
                self._own[name] = {**self.config["gateway"]["others"][int(number) - 2], **dict(own)}
            return self._own[name]
        if stage not in STAGES:
            return {}
        if not number:
            return {key: self.config["stages"][stage][key] for key in ("inbox", "http")}
        if name not in self._own:
            self._own[name] = dict(zip(("inbox", "http"), free_addresses(2), strict=True))
        return self._own[name]

    def signal(self, name: str, number: signal.Signals) -> None:
        self.running[name].send_signal(number)

    def kill(self, name: str) -> None:
        """As the kernel does when memory is short."""
        self.running[name].kill()
        self.running.pop(name).wait()

    def log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(encoding="utf-8")

    def status(self, gateway: str = "gateway") -> StatusReport | None:
        """What a gateway says; none while it does not answer."""
        try:
            with Client(self.addresses(gateway).get("listen", self.address)) as client:
                return client.status()
        except GatewayUnreachableError:
            return None

    def ready(self, replicas: int = 1, gateway: str = "gateway") -> bool:
        """So many replicas of each stage take requests of a gateway."""
        report = self.status(gateway)
        return report is not None and all(
            sum((each.name, each.state) == (stage, "ready") for each in report.stages) == replicas
            for stage in STAGES
        )

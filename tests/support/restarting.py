"""A stack whose dead processes are started again, as Docker Compose does with ``restart: unless-stopped``."""

import signal
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from omnirelay import StatusReport
from shared.messages import STAGES, StageName
from tests.support.processes import Processes, wait_until
from tests.support.stack import free_addresses, make_config
from tests.support.victim import ORDER_VARIABLE

STREAMS: Final = 8
STEP_TIMEOUT_S: Final = 8.0
"""Longer than any step takes on a machine that has other work, and no longer than a test can wait."""
DRAIN_S: Final = 60.0
"""Longer than the answers take there."""
OPEN: Final = ("received", "queued", "thinking", "talking", "synthesizing")
"""States of requests that have not ended."""
PAUSE_S: Final = 0.1
"""Docker's own, before the first restart."""


class Death(NamedTuple):
    """A process that ended.

    Attributes:
        name: Which one.
        pid: Its id.
        status: Its exit status; negative for the signal that killed it.
        at: When it was seen, in monotonic seconds.
    """

    name: str
    pid: int
    status: int
    at: float


class RestartingStack(Processes):
    """Gateways, and stages that can be told to fail.

    Args:
        model: The checkpoint.
        directory: For the configuration, logs and orders.
        replicas: Of each stage.
        max_active: Requests of a gateway at the stages at once.
        gateways: How many share them.

    Attributes:
        deaths: Every process that ended, in order.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        replicas: int = 1,
        max_active: int = STREAMS + 1,
        gateways: int = 1,
    ) -> None:
        free = iter(free_addresses(2 * (gateways - 1)))
        gateway = {
            "others": [{"events": events, "control": next(free)} for events in free],
            "step_timeout_s": STEP_TIMEOUT_S,
            "drain_s": DRAIN_S,
            "limits": {"max_active": max_active},
        }
        super().__init__(make_config(model, gateway=gateway), directory)
        self.replicas: Final = replicas
        self.gateways: Final = ["gateway", *(f"gateway {number}" for number in range(2, gateways + 1))]
        self.deaths: list[Death] = []
        self._folder = directory
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="restarts")

    @property
    def names(self) -> list[str]:
        """All processes: the gateways, and the replicas of each stage."""
        return [*self.gateways, *(name for stage in STAGES for name in self.of(stage))]

    def of(self, stage: StageName) -> list[str]:
        """The replicas of a stage."""
        return [stage, *(f"{stage} {number}" for number in range(2, self.replicas + 1))]

    def __enter__(self) -> Self:
        for name in self.names:
            self.start(name)
        self._watcher.start()
        try:
            wait_until(self.all_ready, "all replicas are ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._watcher.join()
        super().__exit__()

    def module(self, name: str) -> list[str]:
        stage = name.partition(" ")[0]
        return ["tests.support.victim", stage] if stage in STAGES else super().module(name)

    def environment(self, name: str) -> dict[str, str]:
        # The gateway tells when each abort was confirmed.
        level = "debug" if name == "gateway" else "info"
        return {ORDER_VARIABLE: str(self._order(name)), "OMNIRELAY_LOG_LEVEL": level}

    def order(self, name: str, moment: str, failure: str) -> None:
        """Let a stage fail in its next step."""
        self._order(name).write_text(f"{moment} {failure}", encoding="ascii")
        self.signal(name, signal.SIGUSR1)

    def pids(self) -> dict[str, int]:
        """The processes that run now."""
        return {name: process.pid for name, process in self.running.items()}

    def replica(self, name: str) -> str:
        """What the process of a stage goes by at the gateway."""
        report = self.status()
        pid = self.running[name].pid
        return next((each.replica or "" for each in report.stages if each.pid == pid), "") if report else ""

    def all_ready(self) -> bool:
        """Those that run now, and no others, take requests of each gateway."""
        stages = {pid for name, pid in self.pids().items() if name not in self.gateways}
        return all(self._all_ready(self.status(gateway), stages) for gateway in self.gateways)

    @staticmethod
    def _all_ready(report: StatusReport | None, stages: set[int]) -> bool:
        return report is not None and {
            each.pid for each in report.stages if each.state == "ready"
        } == stages == {each.pid for each in report.stages}

    def _order(self, name: str) -> Path:
        return self._folder / f"{name}.order"

    def _watch(self) -> None:
        while not self._stopping.wait(PAUSE_S):
            for name, process in list(self.running.items()):
                status = process.poll()
                if status is not None:
                    self.deaths.append(Death(name, process.pid, status, time.monotonic()))
                    self.start(name)


def settled(stack: RestartingStack) -> dict[str, Any]:
    """What is not at rest: by process, what it still holds; nothing if all is well."""
    told: dict[str, Any] = {}
    for gateway in stack.gateways:
        report = stack.status(gateway)
        if report is None:
            return {gateway: "does not answer"}
        told |= {
            f"{state} at the {gateway}": report.requests[state] for state in OPEN if report.requests[state]
        }
        for each in report.stages:
            load = each.load
            if each.state != "ready" or load.running or load.waiting or load.held_bytes or load.outbox_bytes:
                told[f"{each.name} {each.pid}"] = (each.state, load)
    return told

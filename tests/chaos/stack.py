"""A stack whose dead processes are started again, as Docker Compose does with ``restart: unless-stopped``."""

import signal
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from shared.messages import STAGES, StageName
from tests.chaos.victim import ORDER_VARIABLE
from tests.support.processes import Processes, wait_until
from tests.support.stack import make_config

STREAMS: Final = 8
RESUME_WAIT_S: Final = 180.0
"""Longer than a stage takes to start on a machine that has other work."""
STEP_TIMEOUT_S: Final = 8.0
"""Longer than any step takes on a machine that has other work, and no longer than a test can wait."""
DRAIN_S: Final = 60.0
"""Longer than the answers take there."""
LOG_LEVELS: Final = {"gateway": "debug"}
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


class ChaosStack(Processes):
    """A gateway and stages that can be told to fail.

    Args:
        model: The checkpoint.
        directory: For the configuration, logs and orders.
        replicas: Of each stage.
        max_active: Requests at the stages at once.

    Attributes:
        deaths: Every process that ended, in order.
    """

    def __init__(
        self, model: Path, directory: Path, replicas: int = 1, max_active: int = STREAMS + 1
    ) -> None:
        gateway = {
            "resume_wait_s": RESUME_WAIT_S,
            "step_timeout_s": STEP_TIMEOUT_S,
            "drain_s": DRAIN_S,
            "limits": {"max_active": max_active},
        }
        super().__init__(make_config(model, gateway=gateway), directory)
        self.replicas: Final = replicas
        self.deaths: list[Death] = []
        self._folder = directory
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="restarts")

    @property
    def names(self) -> list[str]:
        """All processes: the gateway, and the replicas of each stage."""
        return ["gateway", *(name for stage in STAGES for name in self.of(stage))]

    def of(self, stage: StageName) -> list[str]:
        """The replicas of a stage."""
        return [stage, *(f"{stage} {number}" for number in range(2, self.replicas + 1))]

    def __enter__(self) -> Self:
        for name in self.names:
            self.start(name)
        self._watcher.start()
        try:
            wait_until(lambda: self.ready(self.replicas), "all replicas are ready")
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
        return ["tests.chaos.victim", stage] if stage in STAGES else super().module(name)

    def environment(self, name: str) -> dict[str, str]:
        # The gateway tells when each abort was confirmed.
        return {ORDER_VARIABLE: str(self._order(name)), "OMNIRELAY_LOG_LEVEL": LOG_LEVELS.get(name, "info")}

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
        """Those that run now, and no others, take requests."""
        report = self.status()
        if report is None:
            return False
        told = {each.pid for each in report.stages if each.state == "ready"}
        return told == {pid for name, pid in self.pids().items() if name != "gateway"} and all(
            each.state == "ready" for each in report.stages
        )

    def _order(self, name: str) -> Path:
        return self._folder / f"{name}.order"

    def _watch(self) -> None:
        while not self._stopping.wait(PAUSE_S):
            for name, process in list(self.running.items()):
                status = process.poll()
                if status is not None:
                    self.deaths.append(Death(name, process.pid, status, time.monotonic()))
                    self.start(name)


def settled(stack: ChaosStack) -> dict[str, Any]:
    """What is not at rest: by process, what it still holds; nothing if all is well."""
    report = stack.status()
    if report is None:
        return {"gateway": "does not answer"}
    active_requests = ("received", "queued", "thinking", "talking", "synthesizing")
    told: dict[str, Any] = {
        state: report.requests[state] for state in active_requests if report.requests[state]
    }
    for each in report.stages:
        load = each.load
        if each.state != "ready" or load.running or load.waiting or load.held_bytes or load.outbox_bytes:
            told[f"{each.name} {each.pid}"] = (each.state, load)
    return told

"""One process on a node of a cluster: started again, told of other gateways, stopped in order."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.cluster import supervisor
from ops.cluster.supervisor import Gateways, Supervisor
from shared.config import GatewayAddresses

WITHIN_S = 60.0
OBEDIENT = (
    "import os, signal, sys\n"
    "def read(*_): print(open(os.environ['FILE']).read(), os.environ['OWN'], flush=True)\n"
    "signal.signal(signal.SIGHUP, read)\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    "read()\n"
    "while True: signal.pause()\n"
)
STUBBORN = OBEDIENT.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")


class Running:
    """A supervisor whose gateways a test sets; its process says where they are, and which start it was."""

    def __init__(self, program: str, file: Path) -> None:
        self.gateways: Gateways | None = [at("first")]
        self.owns = 0
        self._file = file
        command = [sys.executable, "-c", program]
        self.supervisor = Supervisor("talker-1", command, self._own, self._where, self._write)
        self.task = asyncio.create_task(self.supervisor.run())

    def _own(self) -> dict[str, str]:
        self.owns += 1
        return {"OWN": str(self.owns), "FILE": str(self._file)}

    async def _where(self) -> Gateways | None:
        return self.gateways

    def _write(self, gateways: Gateways) -> None:
        self._file.write_text(",".join(each.control.removeprefix("ipc://") for each in gateways))

    async def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, self.supervisor.report()
            await asyncio.sleep(0.02)

    async def said(self, line: str) -> int:
        """Wait for a line of output; gives the process's id."""
        await self.until(lambda: line in self.supervisor.report().tail)
        pid = self.supervisor.report().pid
        assert pid is not None
        return pid


def at(path: str) -> GatewayAddresses:
    return GatewayAddresses(events=f"ipc://{path}", control=f"ipc://{path}")


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "FIRST_PAUSE_S"):
        monkeypatch.setattr(supervisor, name, 0.05)
    monkeypatch.setattr(supervisor, "STOP_S", 1.0)


@pytest.fixture
async def running(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Running]:
    made = Running(getattr(request, "param", OBEDIENT), tmp_path / "gateways")
    yield made
    made.supervisor.stop(0.0)
    await asyncio.wait_for(made.task, WITHIN_S)


async def test_a_process_that_dies_is_started_again(running: Running) -> None:
    first = await running.said("first 1")
    os.kill(first, signal.SIGKILL)
    second = await running.said("first 2")
    assert first != second
    report = running.supervisor.report()
    assert (report.state, report.restarts, report.ending) == ("running", 1, "was killed by SIGKILL")


@pytest.mark.parametrize("running", ["print('broken', flush=True); raise SystemExit(3)"], indirect=True)
async def test_one_that_cannot_start_is_tried_less_and_less_often(running: Running) -> None:
    times: list[float] = []

    def thrice() -> bool:
        if running.owns > len(times):
            times.append(time.monotonic())
        return len(times) == 4

    await running.until(thrice)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert pauses[0] > 0.05
    assert pauses[2] > 0.2
    assert "broken" in running.supervisor.report().tail
    assert running.supervisor.report().ending == "ended with exit status 3"


async def test_nothing_is_started_before_there_is_a_gateway(tmp_path: Path) -> None:
    made = Running(OBEDIENT, tmp_path / "gateways")
    made.gateways = None
    await asyncio.sleep(0)
    assert made.supervisor.report().state == "waiting"
    assert made.owns == 0
    made.gateways = [at("late")]
    await made.said("late 1")
    made.supervisor.stop(0.0)
    await made.task


async def test_a_running_process_is_told_of_other_gateways(running: Running) -> None:
    first = await running.said("first 1")
    running.gateways = None
    await running.until(lambda: running.supervisor.report().state == "running")
    assert running.supervisor.report().pid == first
    running.gateways = [at("first"), at("second")]
    assert await running.said("first,second 1") == first
    running.gateways = [at("second")]
    assert await running.said("second 1") == first
    # The next one reads it when it starts.
    os.kill(first, signal.SIGKILL)
    assert await running.said("second 2") != first


@pytest.mark.parametrize(
    ("running", "ending"),
    [(OBEDIENT, "ended with exit status 0"), (STUBBORN, "was killed by SIGKILL")],
    indirect=["running"],
)
async def test_a_stopped_process_is_not_started_again(running: Running, ending: str) -> None:
    await running.said("first 1")
    running.supervisor.stop(0.1)
    await asyncio.wait_for(running.task, WITHIN_S)
    report = running.supervisor.report()
    assert (report.state, report.restarts, report.ending) == ("ended", 0, ending)


async def test_a_process_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from ops.cluster.supervisor import Supervisor\n"
        "async def where(): return []\n"
        "child = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "asyncio.run(Supervisor('x', [sys.executable, '-c', child], dict, where, len).run())\n",
        encoding="utf-8",
    )
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    with parent.stdout:
        child = psutil.Process(int(parent.stdout.readline().split()[-1]))
        parent.kill()
        parent.wait()
        child.wait(WITHIN_S)

"""Runs one process of the stack: starts it again when it ends, and tells it where the gateways are."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from ops.child import Child
from ops.console import announce, console
from shared.config import GatewayAddresses

POLL_S: Final = 1.0
"""Time between two looks at the gateways' addresses."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""Pauses before a process is started again double from the first to the longest."""
STEADY_S: Final = 60.0
"""A process that ran for so long is started again after the first pause."""
STOP_S: Final = 8.0
"""Time for a process to stop by itself once no request is left; then it is killed."""

Gateways = Sequence[GatewayAddresses]
"""Where the gateways are; for a gateway itself, none."""

State = Literal["waiting", "running", "stopping", "ended"]
"""Of a process: not started for want of a gateway, running, told to end, ended as it was told."""


@dataclass(frozen=True)
class Report:
    """A process as its supervisor sees it.

    Attributes:
        state: What it does.
        pid: Its id; None before it was started.
        restarts: How often it was started again.
        ending: How it ended the last time, in words; empty before.
        tail: Its last lines of output; those of the one before it until it writes something.
    """

    state: State
    pid: int | None
    restarts: int
    ending: str
    tail: tuple[str, ...]


class Supervisor:
    """One process, until it is told to stop.

    Args:
        name: What its output goes by.
        command: The program and its arguments.
        own: Gives environment variables of its own, asked before each start.
        gateways: Gives where the gateways are; None while that is unknown, and then nothing is started.
        write: Writes that where the process reads it, before its start and when it has changed; then the
            process is sent SIGHUP.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        own: Callable[[], Mapping[str, str]],
        gateways: Callable[[], Awaitable[Gateways | None]],
        write: Callable[[Gateways], None],
    ) -> None:
        self._name = name
        self._command = command
        self._own = own
        self._gateways = gateways
        self._write = write
        self._child: Child | None = None
        self._starts = 0
        self._ending = ""
        self._tail: tuple[str, ...] = ()
        self._stopping = asyncio.Event()
        self._grace_s = 0.0
        self._over = False

    def report(self) -> Report:
        """The process as it is now."""
        child = self._child
        state: State = "running" if child is not None and child.alive else "waiting"
        if self._stopping.is_set():
            state = "ended" if self._over else "stopping"
        tail = () if child is None else tuple(child.tail)
        pid = None if child is None else child.pid
        return Report(state, pid, max(0, self._starts - 1), self._ending, tail or self._tail)

    async def run(self) -> None:
        """Run it until :meth:`stop`."""
        pause = FIRST_PAUSE_S
        try:
            while not self._stopping.is_set():
                gateways = await self._gateways()
                if gateways is None:
                    await self._rest(POLL_S)
                    continue
                self._write(gateways)
                began = time.monotonic()
                self._starts += 1
                self._child = await Child.start(self._name, self._command, console.show, self._own())
                await self._watch(self._child, gateways)
                self._ending, self._tail = self._child.ending, tuple(self._child.tail)
                if self._stopping.is_set():
                    return
                announce(f"{self._name} {self._ending}: it is started again")
                if time.monotonic() - began > STEADY_S:
                    pause = FIRST_PAUSE_S
                await self._rest(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
        finally:
            self._over = True

    def stop(self, grace_s: float) -> None:
        """Let :meth:`run` end the process: it may finish its requests, and is killed when it is late.

        Args:
            grace_s: How long its requests may take.
        """
        self._grace_s = grace_s
        self._stopping.set()

    async def _watch(self, child: Child, gateways: Gateways) -> None:
        """Wait for its end, or end it when it is to stop."""
        while not await child.wait(POLL_S):
            if self._stopping.is_set():
                await _end(child, self._grace_s + STOP_S)
                return
            now = await self._gateways()
            if now is not None and now != gateways:
                gateways = now
                self._write(gateways)
                child.send_signal(signal.SIGHUP)

    async def _rest(self, seconds: float) -> None:
        """Wait, but not beyond :meth:`stop`."""
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([stopping], timeout=seconds)
        stopping.cancel()


async def _end(child: Child, within_s: float) -> None:
    child.terminate()
    if not await child.wait(within_s):
        announce(f"{child.name} did not stop within {within_s:.0f} s: killed")
        child.kill()
        await child.wait()

"""One process of the stack, as its launcher or its actor on a Ray cluster sees it."""

import asyncio
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ops.console import announce, console
from shared.ending import ending_of

TAIL_LINES: Final = 12
MAX_LINE_BYTES: Final = 1 << 16
ROOM_S: Final = 0.1
STOP_S: Final = 8.0
"""Time for a process to stop by itself once no request is left; then it is killed."""
GUARD: Final = Path(__file__).with_name("guard.py")


class Child:
    """A process whose output is read line by line; ``show`` is called with its name and each line.

    Attributes:
        name: Its own.
        tail: Its last lines.
        served: It has been seen to serve.
        ended: Is done when it has ended and its output has been read.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, show: Callable[[str, str], None]
    ) -> None:
        self.name: Final = name
        self.tail: Final[deque[str]] = deque(maxlen=TAIL_LINES)
        self.served = False
        self._process = process
        self._show = show
        self.ended: Final = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        show: Callable[[str, str], None],
        changes: Mapping[str, str | None] | None = None,
    ) -> "Child":
        """Start a program that dies with this process; call it on the main thread.

        Args:
            name: E.g. ``thinker``.
            command: The program and its arguments.
            show: Called with the name and each line of output.
            changes: Environment variables that differ from this process's; None: not set.
        """
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | dict(changes or {})
        # Inherited until the guard ignores it: SIGHUP would end what has not begun to handle it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        starting = asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(GUARD),
            str(os.getpid()),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={name: value for name, value in environment.items() if value is not None},
            # A session of its own: Ctrl-C reaches the launcher only, which stops all in order.
            start_new_session=True,
        )
        try:
            return cls(name, await starting, show)
        finally:
            # Another start at the same time may have found it blocked by this one.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP} - blocked)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """It runs, or its output has not been read to the end."""
        return not self.ended.done()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return ending_of(self._process.returncode)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; False on a timeout."""
        done, _ = await asyncio.wait([self.ended], timeout=timeout_s)
        return bool(done)

    async def end(self, within_s: float) -> None:
        """Ask it to stop, and kill it after ``within_s``."""
        self.terminate()
        if not await self.wait(within_s):
            announce(f"the {self.name} did not stop within {within_s:.0f} s: killed", logging.WARNING)
            self.kill()
            await self.wait()

    def terminate(self) -> None:
        """Ask it to stop."""
        if self._process.returncode is None:
            self._process.terminate()

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        if self._process.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and its process group."""
        # It may have ended already, which this loop has not been told yet.
        with suppress(ProcessLookupError):
            if self._process.returncode is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _run(self) -> None:
        reading = asyncio.create_task(self._read())
        await self._process.wait()
        # A grandchild may hold the pipe open for longer.
        await asyncio.wait([reading], timeout=0.5)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> None:
        if self._process.stdout is None:
            return
        rest = b""
        while data := await self._process.stdout.read(MAX_LINE_BYTES):
            while not console.has_room and self._process.returncode is None:
                # A process whose pipe is full drops lines, and counts them.
                await asyncio.sleep(ROOM_S)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines.append(rest)
                rest = b""
            for line in lines:
                self._take(line)
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.tail.append(text)
            self._show(self.name, text)


def last_words(name: str, ending: str, tail: Iterable[str]) -> str:
    """Describe the end of a process, with its last lines of output."""
    lines = "".join(f"\n  [{name}] {line}" for line in tail)
    return f"{name} {ending}" + (f"; its last lines:{lines}" if lines else " and said nothing")

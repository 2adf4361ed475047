"""The command line as a process, at a terminal of its own or behind a pipe."""

import asyncio
import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

DEADLINE_S = 60.0
COLUMNS: Final = 80
CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
# In a session of its own, the first terminal that a process opens is its controlling terminal, whose
# Ctrl-C reaches it.  A program in the background of a shell, as the tests may be, has it ignored, and so
# would those that it starts.
_AT_TERMINAL: Final = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
    "terminal = os.open(sys.argv[1], os.O_RDWR);"
    "[os.dup2(terminal, number) for number in (0, 1, 2)];"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OMNI")}
    return kept | {"TERM": "xterm", "PYTHONUNBUFFERED": "1"} | changes


class Terminal:
    """A terminal with a program at it: what is typed, what is seen."""

    def __init__(self, descriptor: int, process: asyncio.subprocess.Process) -> None:
        self.seen = ""
        self.process = process
        self._descriptor = descriptor
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(descriptor, self._read)

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    async def interrupt(self) -> None:
        """Type Ctrl-C when the program waits for input.

        Python does not see a signal that comes while readline has not begun to wait, or still works on a key.
        """
        status = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        async with asyncio.timeout(DEADLINE_S):
            while status.read_text().rpartition(")")[2].split()[0] != "S":
                await asyncio.sleep(0.01)
        self.type(CTRL_C)

    async def see(self, text: str) -> str:
        """Wait for a text; gives what was seen up to its end, and looks only behind it from then on."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while text not in self.seen:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"no {text!r} in {self.seen!r}") from None
        before, _, self.seen = self.seen.partition(text)
        return before + text

    async def enter(self, line: str) -> None:
        """Type a line at the prompt."""
        await self.see("> ")
        self.type(line + ENTER)

    async def leave(self) -> None:
        """Type Ctrl-D at the prompt."""
        await self.see("> ")
        self.type(CTRL_D)
        assert await self.ended() == 0

    async def ended(self) -> int:
        """Wait for the program's end; gives its exit status."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await self.process.wait()
        except TimeoutError:
            raise AssertionError(f"the program goes on after {self.seen!r}") from None

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)

    def _read(self) -> None:
        self.seen += os.read(self._descriptor, 1 << 16).decode(errors="replace")
        self._changed.set()


@asynccontextmanager
async def terminal(*command: str, cwd: Path | None = None, **variables: str) -> AsyncIterator[Terminal]:
    """Run ``python COMMAND`` at a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    os.set_blocking(ours, False)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _AT_TERMINAL,
        os.ttyname(theirs),
        *command,
        env=environment(**variables),
        cwd=cwd,
        start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL,
    )
    shown = Terminal(ours, process)
    try:
        yield shown
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        shown.close()
        # Until here, because a terminal that nobody has open cannot be read.
        os.close(theirs)


async def piped(
    *command: str, lines: bytes, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> tuple[int, str, str]:
    """Run ``python COMMAND`` with lines from a pipe; gives the exit status, what it printed, what it told."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(**(env or {})),
        cwd=cwd,
    )
    async with asyncio.timeout(2 * DEADLINE_S):
        out, told = await process.communicate(lines)
    return process.returncode or 0, out.decode(), told.decode()


def make_program(path: Path, script: str) -> None:
    """Write a shell script that finds its tools although PATH has only the programs of a test."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\nPATH=/bin:/usr/bin\n{script}\n")
    path.chmod(0o755)

"""A decoder process, as the thinker sees it."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from omnirelay.errors import MessageError
from services.thinker.media.decode.pipe import STARTS, Pipe
from shared.ending import ending_of

WORKER: Final = (sys.executable, "-m", "services.thinker.media.decode.worker")
_START_S: Final = 60.0
_END_S: Final = 5.0


class DecoderProcess:
    """A child, started with its end of the socket pair; raises ``OSError`` if it cannot be."""

    def __init__(self, command: Sequence[str]) -> None:
        self.ready = False
        ours, theirs = socket.socketpair()
        self.pipe: Final = Pipe(ours)
        try:
            with theirs:
                self._process: Final = subprocess.Popen(  # noqa: S603  The program is our own.
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=_environment(),
                )
        except OSError:
            ours.close()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """It has not ended."""
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return ending_of(self._process.poll())

    def wait_until_ready(self, limits: msgspec.Struct, *data: bytes) -> None:
        """Give it its limits and what follows them, and wait until it takes files.

        Raises MessageError at another answer or none, ``EOFError`` or ``OSError`` if it ended.
        """
        self.pipe.set_deadline(_START_S)
        try:
            self.pipe.send(limits, *data)
            self.pipe.receive(STARTS)
        except TimeoutError as error:
            raise MessageError(f"it has not started within {_START_S:g} s") from error
        self.ready = True

    def kill(self) -> None:
        """End it at once.  May be called by any thread, also while another one waits for the child."""
        self._process.kill()

    def end(self) -> None:
        """Let it end, close the pipe, and wait until it is gone."""
        self.pipe.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _environment() -> dict[str, str]:
    """The thinker's, for a process that multiplies no matrices: threads for that would take memory."""
    # On a CPU, vLLM has libraries of PyTorch preloaded into every child.
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return own | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

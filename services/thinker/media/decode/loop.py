"""The loop of a child process that works for the thinker: one job after the other, from a socket pair.

The child ends when the thinker closes its end, or is gone.  What comes in is from anywhere: a crash, an
endless loop or a bomb in here costs one job.
"""

import signal
import socket
import sys
from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from services.thinker.media.decode.pipe import Pipe, Ready


class Job(Protocol):
    """A header that bytes follow."""

    @property
    def size(self) -> int:
        """How many."""


_Job = TypeVar("_Job", bound=Job)


def serve_jobs(
    pipe: Pipe, jobs: msgspec.msgpack.Decoder[_Job], timeout_s: float, work: Callable[[_Job, bytes], None]
) -> None:
    """Work until the other end is closed: then raises ``EOFError``, or ``OSError`` while sending."""
    pipe.send(Ready())
    while True:
        job = pipe.receive(jobs)
        # The thinker ends a child that is late.  Where it cannot, being gone, the alarm does.
        signal.setitimer(signal.ITIMER_REAL, 1 + 1.25 * timeout_s)
        work(job, pipe.receive_bytes(job.size))
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_child(serve: Callable[[Pipe], None]) -> None:
    """Serve the thinker, which gave the descriptor of the pipe."""
    # Ctrl-C reaches the whole group; the thinker ends its children itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(Pipe(socket.socket(fileno=int(sys.argv[1]))))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        # Nobody is there to be told: an ordinary end.
        return

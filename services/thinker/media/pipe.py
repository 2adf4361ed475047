"""What the thinker and a child process that works for it say to each other, and the child's loop.

A message is four bytes of length, big-endian, and a msgpack map of at most :data:`MAX_HEADER_BYTES`; the
bytes of a file, or of what was decoded, follow as they are.  Neither side unpickles anything.

The child ends when the thinker closes its end, or is gone.  What comes in is from anywhere: a crash, an
endless loop or a bomb in there costs one job.
"""

import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta

from omnirelay.errors import MessageError, said
from services.thinker.media.decoded import DecodeLimits
from shared.messages import MediaKind

MAX_HEADER_BYTES: Final = 1 << 16
_LENGTH: Final = struct.Struct(">I")

_Side = Annotated[int, Meta(ge=1, lt=2**31)]
_Header = TypeVar("_Header")


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """Decoder to thinker: started, and nothing but files is waited for."""


class DecodeJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="job"):
    """Thinker to decoder: decode this file, whose bytes follow; of a video the sound too, if wanted."""

    kind: MediaKind
    size: int
    with_audio: bool = False


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done"):
    """Decoder to thinker: pixels, uint8, and samples, float32, follow, each as far as they are wanted."""

    pixels: Annotated[tuple[_Side, ...], Meta(min_length=3, max_length=4)] | None = None
    samples: _Side | None = None


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """Decoder to thinker: the file cannot be used; after ``memory`` the process is not to be used again."""

    reason: Literal["invalid", "too_large", "memory"]
    message: Annotated[str, Meta(max_length=1000)]


Answer = Done | Refused

LIMITS: Final = msgspec.msgpack.Decoder(DecodeLimits)
STARTS: Final = msgspec.msgpack.Decoder(Ready)
JOBS: Final = msgspec.msgpack.Decoder(DecodeJob)
ANSWERS: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


class Pipe:
    """One end of the socket pair.

    Every method raises ``TimeoutError`` when the deadline passes, ``EOFError`` when the other end is closed,
    and ``OSError`` when it breaks.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket: Final = connection
        self._deadline: float | None = None

    def set_deadline(self, seconds: float | None) -> None:
        """Let what follows end within so many seconds from now; none waits for ever."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def send(self, header: msgspec.Struct, *data: memoryview | bytes) -> None:
        """Send a header and what follows it."""
        encoded = msgspec.msgpack.encode(header)
        for part in (_LENGTH.pack(len(encoded)) + encoded, *data):
            self._socket.settimeout(self._remaining())
            self._socket.sendall(part)

    def receive(self, decoder: msgspec.msgpack.Decoder[_Header]) -> _Header:
        """The next header; raises MessageError if it is too long, or not what was expected."""
        prefix = bytearray(_LENGTH.size)
        self.receive_into(memoryview(prefix))
        (length,) = _LENGTH.unpack(prefix)
        if length > MAX_HEADER_BYTES:
            raise MessageError(f"a header of {length} bytes; at most {MAX_HEADER_BYTES} are taken")
        header = bytearray(length)
        self.receive_into(memoryview(header))
        try:
            return decoder.decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"a header that cannot be read: {said(error)}") from error

    def receive_into(self, buffer: memoryview) -> None:
        """Fill a contiguous buffer of bytes."""
        position = 0
        while position < len(buffer):
            self._socket.settimeout(self._remaining())
            count = self._socket.recv_into(buffer[position:])
            if not count:
                raise EOFError("the other end is closed")
            position += count

    def receive_bytes(self, size: int) -> bytes:
        """The next so many bytes."""
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _remaining(self) -> float | None:
        if self._deadline is None:
            return None
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        return remaining


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


def bound_memory(further: int) -> None:
    """Let allocations fail beyond so many further bytes, and crashes leave no core."""
    # Seventh column of proc_pid_statm(5): what RLIMIT_DATA counts, and the stack.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    bound = pages * resource.getpagesize() + further
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

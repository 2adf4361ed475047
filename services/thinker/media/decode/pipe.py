"""What the thinker and a decoder process say to each other over a socket pair.

A message is four bytes of length, big-endian, and a msgpack map of at most :data:`MAX_HEADER_BYTES`; the
bytes of a file, or of what was decoded, follow as they are.  Neither side unpickles anything.
"""

import socket
import struct
import time
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from omnirelay.errors import MessageError, said
from services.thinker.media.limits import DecodeLimits
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

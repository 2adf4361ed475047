"""Bytes as they come through a network: cut anywhere."""

import asyncio
import random
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

MAX_CUTS = 6
BYTE_BY_BYTE = 96
"""Inputs up to this length are cut everywhere now and then."""


def cut(data: bytes) -> list[bytes]:
    """Cut data at places that the data themselves decide."""
    chance = random.Random(zlib.crc32(data))
    if len(data) <= BYTE_BY_BYTE and chance.random() < 0.25:
        return [data[at : at + 1] for at in range(len(data))]
    places = sorted(chance.randint(0, len(data)) for _ in range(chance.randint(1, MAX_CUTS)))
    pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
    # A network never delivers nothing: to h11 that would be the end.
    return [piece for piece in pieces if piece]


def framed(data: bytes) -> bytes:
    """Turn bytes into frames that are whole, so that what is in them is looked at.

    The first byte says whether they are (``f``), or come as they are; of a frame two bytes tell the length.
    """
    if data[:1] != b"f":
        return data[1:]
    frames, at = bytearray(), 1
    while at < len(data):
        body = data[at + 2 : at + 2 + int.from_bytes(data[at : at + 2], "big")]
        frames += len(body).to_bytes(4, "big") + body
        at += 2 + len(body)
    return bytes(frames)


async def settle(rounds: int = 12) -> None:
    """Let everything run that waits for nothing but its turn."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def at_once(function: Callable[..., T], *arguments: Any) -> T:
    """Stand in for :func:`asyncio.to_thread`: the same, but always as fast."""
    return function(*arguments)


class Transport(asyncio.Transport):
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 40_000), "sockname": ("127.0.0.1", 8000)})
        self.written = bytearray()
        self.protocol: Any = None
        self._closing = False

    def write(self, data: Any) -> None:
        if not self._closing:
            self.written += data

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False


class OpenProtocol(asyncio.streams.FlowControlMixin):
    """The protocol of a writer whose other end always reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)

    def _get_close_waiter(self, _: Any) -> "asyncio.Future[None]":
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        closed.set_result(None)
        return closed


def connection() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Transport]:
    """Give both ends of a connection as a server or client holds them, and what they are made of."""
    loop, transport = asyncio.get_running_loop(), Transport()
    reader = asyncio.StreamReader(loop=loop)
    return reader, asyncio.StreamWriter(transport, OpenProtocol(loop), None, loop), transport


async def feed(reader: asyncio.StreamReader, pieces: list[bytes]) -> None:
    """Let pieces come, one after the other."""
    for piece in pieces:
        reader.feed_data(piece)
        await settle()

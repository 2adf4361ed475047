"""What a client writes to the gateway's TCP port, whole and cut; nothing depends on where it is cut."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, cast
from unittest import mock

import msgspec

from gateway.access.access import Access
from gateway.fairness.thread import FairThread
from gateway.fairness.uploads import UploadRoom
from gateway.manager import Gateway
from gateway.tcp.connection import Connection
from omnirelay.protocol import LENGTH_BYTES, Reply, ServerMessage
from tests.fuzz.intake import CONFIG, INTERNAL, STATUS, Intake
from tests.fuzz.streams import connection, cut, feed, framed

PIECE_BYTES: Final = 600
"""Longer frames count as uploads here: few enough for the fuzzer to make them."""
STILL: Final = b"is still being answered"
ROOM: Final = 2**30


def check(data: bytes) -> None:
    """Serve a client that says this, in two ways."""
    data = framed(data)
    with (
        mock.patch("gateway.tcp.connection.PIECE_BYTES", PIECE_BYTES),
        mock.patch("gateway.fairness.uploads.PIECE_BYTES", PIECE_BYTES),
    ):
        whole, pieces = (asyncio.run(_serve(each)) for each in ([data], cut(data)))
    # Whether a name may be used again depends on who has heard of its end, and so on time.
    if STILL not in whole and STILL not in pieces:
        assert whole == pieces


async def _serve(pieces: list[bytes]) -> bytes:
    """Give all that the gateway says."""
    reader, writer, transport = connection()
    intake, uploads, access, parsing = Intake(), UploadRoom(ROOM), Access(CONFIG), FairThread("parsing")
    refused: Counter[str] = Counter()
    given = access, uploads, lambda: STATUS, refused, parsing
    served = Connection(cast(Gateway, intake), reader, writer, "client 1", *given)
    serving = asyncio.create_task(served.serve())
    await feed(reader, pieces)
    reader.feed_eof()
    async with asyncio.timeout(60):
        await serving
    writer.close()
    for message in _messages(bytes(transport.written)):
        if isinstance(message, Reply):
            assert cast(Any, message.event).code != INTERNAL, message
    assert INTERNAL not in refused
    assert not uploads.used
    assert not intake.held.total
    parsing.close()
    return bytes(transport.written)


def _messages(written: bytes) -> Iterator[ServerMessage]:
    """Read what was written as the client does; nothing is left over."""
    decoder = msgspec.msgpack.Decoder(ServerMessage)
    at = 0
    while at < len(written):
        end = at + LENGTH_BYTES + int.from_bytes(written[at : at + LENGTH_BYTES], "big")
        assert end <= len(written)
        yield decoder.decode(written[at + LENGTH_BYTES : end])
        at = end

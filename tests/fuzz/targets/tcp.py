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
from omnirelay.content import AudioPart, ChatMessage, ContentPart, ImagePart, TextPart, VideoPart
from omnirelay.protocol import (
    LENGTH_BYTES,
    Cancel,
    GenerateRequest,
    Hello,
    Piece,
    Reply,
    SamplingOverrides,
    ServerMessage,
    StatusQuery,
    Submit,
    pack,
)
from tests.fuzz.intake import CONFIG, INTERNAL, STATUS, Intake
from tests.fuzz.streams import connection, cut, feed, framed, unframed

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


def seeds() -> Iterator[bytes]:
    """Give what clients say: requests of every kind behind a hello."""
    for stream in _streams():
        yield b"r" + stream
        yield unframed(stream)


def _streams() -> Iterator[bytes]:
    hello = pack(Hello(1, "seed"))
    yield hello
    yield pack(Hello(1, "seed", "omr_key")) + pack(StatusQuery(1))
    yield pack(Hello(2))
    yield hello + pack(Cancel(1)) + pack(StatusQuery(2))
    requests = list(_requests())
    for request in requests:
        yield hello + _submit(1, request)
    yield hello + b"".join(_submit(at, request) for at, request in enumerate(requests[:4]))
    yield hello + pack(Submit(1, msgspec.Raw(b"\xc0"))) + pack(Cancel(1))
    body = msgspec.msgpack.encode(requests[0])
    for middle in (0, 9):
        pieces = pack(Piece(1, 0, body[:9])) + pack(Piece(1, middle, body[middle:], last=True))
        yield hello + pieces + pack(Piece(1, 9, body))
    yield hello + pack(Piece(1, 0, body)) + pack(Cancel(1)) + pack(Piece(1, len(body), b"", last=True))


def _submit(name: int, request: GenerateRequest) -> bytes:
    return pack(Submit(name, msgspec.Raw(msgspec.msgpack.encode(request))))


def _requests() -> Iterator[GenerateRequest]:
    user = ChatMessage("user", "Hello")
    yield GenerateRequest(messages=[user])
    yield GenerateRequest(messages=[ChatMessage("system", "Be kind"), user], speech=False, seed=1)
    yield GenerateRequest(prompt_token_ids=[1, 2, 3], speaker="Ethan", priority=3, deadline_s=1.5)
    sampling = SamplingOverrides(
        max_tokens=5, min_tokens=1, temperature=0.5, top_k=3, top_p=0.5, repetition_penalty=1.1
    )
    yield GenerateRequest(messages=[user], text_sampling=sampling, codec_sampling=sampling, streaming=False)
    parts: list[ContentPart] = [
        AudioPart(data=memoryview(b"RIFF")),
        ImagePart(url="data:image/png;base64,iVBORw0KGgo="),
        VideoPart(url="data:,%00%01ab"),
        TextPart("What?"),
    ]
    yield GenerateRequest(
        messages=[ChatMessage("user", parts)],
        use_audio_in_video=True,
        traceparent=f"00-{'1' * 32}-{'2' * 16}-01",
    )
    yield GenerateRequest(messages=[ChatMessage("user", [ImagePart(url="https://example.com/a.png")])])
    long = ChatMessage("user", [AudioPart(data=memoryview(bytes(700)))])
    yield GenerateRequest(messages=[long, ChatMessage("assistant", "No"), user])

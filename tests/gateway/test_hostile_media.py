"""Media that are malformed, too many, too large or too slow are refused, and hold up nobody else."""

import asyncio
import threading
from typing import Any

import msgspec
import pytest

from gateway.fairness.uploads import UploadRoom
from gateway.input.urls import decode_data_url
from omnirelay import ChatMessage, GenerateRequest, errors, image
from omnirelay.content import MAX_MESSAGES, MAX_PARTS
from omnirelay.events import ErrorEvent
from omnirelay.protocol import MAX_PIECE_BYTES, PIECE_BYTES, Cancel, Piece, Refusal, Reply, Submit, pack
from tests.gateway.bench import HI, Bench, Configure, Patch, RawClient, bench, fails, serves, submit
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway

MIB = 2**20
POST = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


def frame_with(size: int, client_id: int = 1) -> bytes:
    """A frame with a picture of so many bytes."""
    return pack(submit(client_id, GenerateRequest(messages=[ChatMessage("user", [image(bytes(size))])])))


def in_message(content: Any) -> bytes:
    return msgspec.msgpack.encode({"messages": [{"role": "user", "content": content}]})


def uploads(b: Bench) -> int:
    return b.process._server._uploads.used


TEXT = {"type": "text", "text": "x"}
WRONG = {
    "a kind that is none": in_message([{"type": "smell", "data": b"x"}]),
    "data that is text": in_message([{"type": "audio", "data": "x"}]),
    "a url that is binary": in_message([{"type": "audio", "url": b"x"}]),
    "a field that is none": in_message([{"type": "audio", "data": b"x", "path": "/etc/passwd"}]),
    "a nested part": in_message([[{"type": "audio", "data": b"x"}]]),
    "too many parts": in_message([TEXT] * (MAX_PARTS + 1)),
    "too many messages": msgspec.msgpack.encode(
        {"messages": [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)}
    ),
    "a url that is not UTF-8": in_message([{"type": "audio", "url": "data:,x"}]).replace(
        b"data:,x", b"data:,\xff"
    ),
    "nothing": in_message([{"type": "video"}]),
    "nil": in_message([{"type": "video", "data": None, "url": None}]),
}


async def test_requests_that_cannot_be_read_end_only_themselves(tcp: Bench, raw: RawClient) -> None:
    for number, request in enumerate(WRONG.values()):
        raw.say(Submit(number, msgspec.Raw(request)))
    codes = {number: code for number, code, _ in [await raw.told() for _ in WRONG]}
    assert codes.keys() == set(range(len(WRONG)))
    assert set(codes.values()) <= {"invalid_request", "media_invalid"}, codes
    assert tcp.process.gateway.held.total == 0
    await serves(tcp)


async def test_deep_nesting_is_refused(tcp: Bench, raw: RawClient) -> None:
    start = b"\x83\xa4type\xa6submit\xa2id\x05\xa7request"
    raw.say_bytes(start + b"\x81\xa8messages" + b"\x91" * MIB + b"\xc0")
    assert isinstance(await raw.hear(), Refusal)
    raw.say(submit(6, HI))
    await tcp.stages.request(0)


async def test_a_frame_may_be_as_long_as_allowed_and_no_longer(configure: Configure) -> None:
    empty = len(frame_with(0)) - 4 + 3

    config = configure(media={"max_request_bytes": MIB, "max_item_bytes": MIB}, request_bytes=MIB)
    async with bench(config) as b:
        raw = await RawClient.connect(b)
        raw.writer.write(frame_with(MIB - empty))
        assert (await b.stages.request(0)).media[0].data.nbytes == MIB - empty
        raw.writer.write(frame_with(MIB - empty + 1, 2)[:5])
        assert f"frame of {MIB + 1} bytes, at most {MIB}" in (await raw.refused()).message
        assert await raw.closed()
        await b.stages.aborted(b.stages.requests[0].request_id)
        await serves(b)


async def test_a_client_that_vanishes_while_it_sends_leaves_nothing(tcp: Bench) -> None:
    half = frame_with(50 * MIB)[: 25 * MIB]
    for abort in (False, True):
        raw = await RawClient.connect(tcp)
        raw.writer.write(half)
        await raw.writer.drain()
        await until(lambda: uploads(tcp) == 25 * MIB - 4)
        if abort:
            raw.writer.transport.abort()
        else:
            await raw.close()
        await until(lambda: uploads(tcp) == 0)
    assert (tcp.process.gateway.held.total, tcp.stages.requests) == (0, [])
    await serves(tcp)


async def test_many_that_send_at_once_hold_up_nobody(tcp: Bench) -> None:
    """Text is answered between the halves of ten large frames, and while they come the loop comes round."""

    clients = [await RawClient.connect(tcp) for _ in range(10)]
    frame = frame_with(8 * MIB)
    middle = len(frame) // 2
    rounds = 0

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    async def send(raw: RawClient, piece: bytes) -> None:
        raw.writer.write(piece)
        await raw.writer.drain()

    counting = asyncio.create_task(count_rounds())
    await asyncio.gather(*(send(raw, frame[:middle]) for raw in clients))
    await until(lambda: uploads(tcp) == 10 * (middle - 4))
    await serves(tcp)
    assert len(tcp.stages.requests) == 1
    await asyncio.gather(*(send(raw, frame[middle:]) for raw in clients))
    await tcp.stages.request(10)
    assert rounds > 10 * len(frame) / (4 * PIECE_BYTES)
    counting.cancel()
    assert tcp.process.gateway.held.total == 80 * MIB
    assert uploads(tcp) == 0
    for raw in clients:
        await raw.close()
    await until(lambda: tcp.process.gateway.held.total == 0)


def picture(size: int) -> list[Any]:
    """Messages of the HTTP API with a picture of about so many bytes."""
    url = "data:;base64," + "A" * (size * 4 // 3 // 4 * 4)
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


SMALL = {"max_request_bytes": MIB, "max_item_bytes": MIB}


async def test_what_is_only_declared_takes_no_memory(configure: Configure) -> None:
    """Frames and bodies of which little comes, from the same address: others are taken meanwhile."""

    config = configure(http_gateway(), SMALL, request_bytes=2 * MIB, held_bytes=2 * MIB)
    async with http_bench(config) as b, b.client() as client:
        for _ in range(8):
            (await RawClient.connect(b)).writer.write((2 * MIB).to_bytes(4, "big") + bytes(10))
        bodies = [await asyncio.open_connection(*b.address) for _ in range(8)]
        for _, writer in bodies:
            writer.write(f"{POST}Content-Length: {2 * MIB}\r\n\r\n".encode() + b"x" * 10)
        await until(lambda: len(b.process._server._uploads._uploads) == 16)
        assert uploads(b) == 0
        b.stages.serve(b.encode("Hello"))
        assert (await client.chat("Hi", images=bytes(MIB // 2)).result()).text == "Hello"
        assert (await b.post(messages=picture(MIB // 2))).status_code == 200
        for _, writer in bodies:
            writer.close()


async def test_the_slowest_is_given_up_when_memory_is_short(configure: Configure, monkeypatch: Patch) -> None:
    """A frame, a request in pieces and a body that do not go on make room for one that does."""
    monkeypatch.setattr("gateway.fairness.uploads.RECENT_S", 0.1)

    config = configure(http_gateway(), SMALL, request_bytes=4 * MIB, held_bytes=3 * MIB)
    async with http_bench(config) as b:
        frame, pieces = await RawClient.connect(b), await RawClient.connect(b)
        reader, writer = await asyncio.open_connection(*b.address)
        frame.writer.write((2 * MIB).to_bytes(4, "big") + bytes(MIB))
        for offset in range(0, MIB, MAX_PIECE_BYTES):
            pieces.say(Piece(7, offset, bytes(MAX_PIECE_BYTES)))
        writer.write(f"{POST}Content-Length: {2 * MIB}\r\n\r\n".encode() + b"x" * MIB)
        await until(lambda: uploads(b) == 3 * MIB)
        slow = list(b.process._server._uploads._uploads)
        await until(lambda: all(each.speed() == 0 for each in slow))
        whole = await RawClient.connect(b)
        whole.writer.write(frame_with(3 * MIB - 1000))
        assert (await whole.told())[1] == "media_too_large"
        assert (await frame.refused()).code == "busy"
        # Of a request in pieces nothing else on the connection is lost.
        refusal = await pieces.hear()
        assert isinstance(refusal, Reply)
        assert isinstance(refusal.event, ErrorEvent)
        assert (refusal.id, refusal.event.code) == (7, "busy")
        assert refusal.event.retry_after_ms
        pieces.say(Piece(7, MIB, b"the rest", last=True))
        pieces.say(submit(8, HI))
        assert await pieces.accepted() == 8
        assert b" 429 " in await reader.readline()
        await until(lambda: uploads(b) == 0)
        writer.close()


async def test_who_has_most_loses_before_who_has_less(configure: Configure) -> None:
    room = UploadRoom(10 * MIB)
    lost: list[str] = []
    greedy = [room.open("greedy", lambda _: lost.append("greedy")) for _ in range(9)]
    for each in greedy:
        each.grow(MIB)
    modest = room.open("modest", lambda _: lost.append("modest"))
    for _ in range(4):
        modest.grow(MIB)
    assert lost == ["greedy"] * 3
    # What is complete is not given up: it is being read.
    alive = [each for each in greedy if each.error is None]
    for each in alive:
        each.finish()
    modest.grow(MIB)
    assert lost == ["greedy"] * 3 + ["modest"]
    for each in greedy:
        each.close()
    alone = room.open("alone", lambda _: lost.append("alone"))
    alone.grow(11 * MIB)
    assert (lost[4:], room.used) == ([], 11 * MIB)
    alone.close()
    assert room.used == 0


async def test_the_gateway_stops_although_frames_are_coming(configure: Configure) -> None:
    async with bench(configure(media=SMALL, request_bytes=2 * MIB, held_bytes=MIB)) as b:
        for _ in range(3):
            (await RawClient.connect(b)).writer.write(frame_with(MIB)[: MIB // 2])
        await until(lambda: uploads(b) > MIB // 2)
        await b.process.stop()
        assert uploads(b) == 0


async def test_a_frame_that_stops_coming_is_given_up(tcp: Bench, raw: RawClient, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.fairness.uploads.IDLE_S", 0.3)

    raw.writer.write(frame_with(50 * MIB)[: 40 * MIB])
    assert "comes too slowly" in (await raw.refused()).message
    assert await raw.closed()
    raw = await RawClient.connect(tcp)
    raw.say(Piece(1, 0, bytes(1000)))
    assert (await raw.told())[1] == "upload_too_slow"
    assert uploads(tcp) == 0
    await serves(tcp)


async def test_a_steady_upload_that_is_too_slow_is_given_up(web: HttpBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.fairness.uploads.IDLE_S", 0.5)

    reader, writer = await asyncio.open_connection(*web.address)
    writer.write(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode())
    answer = asyncio.create_task(reader.readline())
    while not answer.done():
        writer.write(b"1\r\nx\r\n")
        await asyncio.wait({answer}, timeout=0.05)
    assert b" 408 " in answer.result()
    writer.close()


PIECES: dict[str, tuple[list[Piece], str]] = {
    "with a hole": ([Piece(1, 0, b"x"), Piece(1, 2, b"x", last=True)], "invalid_request"),
    "too long a piece": ([Piece(1, 0, bytes(MAX_PIECE_BYTES + 1))], "invalid_request"),
    "too many": (
        [Piece(1, at, bytes(MAX_PIECE_BYTES)) for at in range(0, 2 * MIB, MAX_PIECE_BYTES)],
        "request_too_large",
    ),
    "no request": ([Piece(1, 0, b"\xc1", last=True)], "invalid_request"),
}


@pytest.mark.parametrize("what", PIECES)
async def test_pieces_that_are_no_request_end_only_that(configure: Configure, what: str) -> None:
    async with bench(configure(media=SMALL, request_bytes=MIB)) as b:
        raw = await RawClient.connect(b)
        pieces, code = PIECES[what]
        for piece in pieces:
            raw.say(piece)
        assert (await raw.told())[:2] == (1, code)
        body = msgspec.msgpack.encode(HI)
        raw.say(Piece(3, 0, body[:5]))
        raw.say(Piece(3, 5, body[5:], last=True))
        assert await raw.accepted() == 3
        assert uploads(b) == 0


async def test_a_cancel_waits_for_no_upload(configure: Configure) -> None:
    """Of the client's own, while another one's takes all memory; and what was begun is let go of."""

    config = configure(media=SMALL, request_bytes=MIB, held_bytes=MIB)
    async with bench(config) as b, b.client() as client:
        other = await RawClient.connect(b)
        other.writer.write(MIB.to_bytes(4, "big") + bytes(MIB - 1))
        await until(lambda: uploads(b) == MIB - 1)
        first = client.chat("Hi")
        request = await b.stages.request(0)
        raw = await RawClient.connect(b)
        raw.say(Piece(5, 0, bytes(MAX_PIECE_BYTES)))
        raw.say(Cancel(5))
        assert (await raw.told())[:2] == (5, "cancelled")
        second = client.chat("Hi", images=bytes(MIB // 2))
        first.cancel()
        await b.stages.aborted(request.request_id)
        second.cancel()
        await fails(first, errors.CancelledRequestError)
        # It may have been refused before, as the slowest of this address.
        with pytest.raises((errors.CancelledRequestError, errors.BusyError)):
            await second.result()
        await other.close()
        await until(lambda: uploads(b) == b.process.gateway.held.total == 0)


async def test_decoding_holds_up_nobody_and_keeps_nothing(tcp: Bench, monkeypatch: Patch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    decoded: list[str] = []

    def slow(name: str, url: str, max_bytes: int) -> bytearray:
        decoded.append(url)
        begun.set()
        go_on.wait(60)
        return decode_data_url(name, url, max_bytes)

    monkeypatch.setattr("gateway.input.media.decode_data_url", slow)

    async with tcp.client() as client, tcp.client() as other:
        try:
            first = client.chat(images="data:,1")
            await until(begun.is_set)
            assert (await other.status()).ready
            waiting = client.chat(images="data:,2")
            await until(lambda: tcp.process.gateway.held.total == 14)
            waiting.cancel()
            await fails(waiting, errors.CancelledRequestError)
            first.cancel()
            await fails(first, errors.CancelledRequestError)
            assert tcp.process.gateway.held.total == 0
        finally:
            go_on.set()
        await serves(tcp)
        assert decoded == ["data:,1"]

"""Media that are malformed, too many, too large or too slow are refused, and hold up nobody else."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from gateway.client import ChatMessage, GenerateRequest, TextPart, image
from gateway.events import ErrorEvent
from gateway.parts import MAX_MESSAGES, MAX_PARTS
from gateway.protocol import PIECE_BYTES, Refused, Reply, Submit, pack
from gateway.urls import decode_data_url
from shared import errors
from shared.config import Config
from tests.gateway.bench import Bench, bench, run
from tests.gateway.fake_stages import until
from tests.gateway.raw_client import HI, RawClient, serves, submit

Configure = Callable[..., Config]
MIB = 2**20


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
    "too many ids": msgspec.msgpack.encode({"prompt_token_ids": [1] * (2**20 + 1)}),
    "a url that is not UTF-8": in_message([{"type": "audio", "url": "data:,x"}]).replace(
        b"data:,x", b"data:,\xff"
    ),
    "nothing": in_message([{"type": "video"}]),
    "nil": in_message([{"type": "video", "data": None, "url": None}]),
}


def test_requests_that_cannot_be_read_end_only_themselves(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(configure()) as b:
            raw = await RawClient.connect(b)
            for number, request in enumerate(WRONG.values()):
                raw.say(Submit(number, msgspec.Raw(request)))
            heard = [await raw.hear() for _ in WRONG]
            for (what, _), reply in zip(WRONG.items(), sorted(heard, key=lambda each: each.id), strict=True):  # type: ignore[union-attr]
                assert isinstance(reply, Reply)
                assert isinstance(reply.event, ErrorEvent), what
                assert reply.event.code in ("invalid_request", "media_invalid"), what
            assert b.process.gateway.held.total == 0
            await raw.close()
            await serves(b)

    run(scenario())


def test_deep_nesting_is_refused(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(configure()) as b:
            raw = await RawClient.connect(b)
            start = b"\x83\xa4type\xa6submit\xa2id\x05\xa7request"
            raw.say_bytes(start + b"\x81\xa8messages" + b"\x91" * MIB + b"\xc0")
            assert isinstance(await raw.hear(), Refused)
            raw.say(submit(6, HI))
            await b.stages.request(0)
            await raw.close()

    run(scenario())


def test_a_frame_may_be_as_long_as_allowed_and_no_longer(configure: Configure) -> None:
    empty = len(frame_with(0)) - 4 + 3

    async def scenario() -> None:
        config = configure(media={"max_request_bytes": MIB, "max_item_bytes": MIB}, request_bytes=MIB)
        async with bench(config) as b:
            raw = await RawClient.connect(b)
            raw.writer.write(frame_with(MIB - empty))
            assert (await b.stages.request(0)).media[0].data.nbytes == MIB - empty
            raw.writer.write(frame_with(MIB - empty + 1, 2)[:5])
            while not isinstance(heard := await raw.hear(), Refused):
                pass
            assert f"frame of {MIB + 1} bytes, at most {MIB}" in heard.message
            assert await raw.closed()
            await raw.close()
            await serves(b)

    run(scenario())


def test_a_client_that_vanishes_while_it_sends_leaves_nothing(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(configure()) as b:
            half = frame_with(50 * MIB)[: 25 * MIB]
            for abort in (False, True):
                raw = await RawClient.connect(b)
                raw.writer.write(half)
                await raw.writer.drain()
                await until(lambda: uploads(b) > 50 * MIB)
                if abort:
                    raw.writer.transport.abort()
                else:
                    await raw.close()
                await until(lambda: uploads(b) == 0)
            assert b.process.gateway.held.total == 0
            assert b.stages.requests == []
            await serves(b)

    run(scenario())


def test_many_that_send_at_once_hold_up_nobody(configure: Configure) -> None:
    """Text is answered between the halves of ten large frames, and while they come the loop comes round."""

    async def scenario() -> None:
        async with bench(configure()) as b:
            clients = [await RawClient.connect(b) for _ in range(10)]
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
            await until(lambda: uploads(b) == 10 * (len(frame) - 4))
            await serves(b)
            assert len(b.stages.requests) == 1
            await asyncio.gather(*(send(raw, frame[middle:]) for raw in clients))
            await b.stages.request(10)
            assert rounds > 10 * len(frame) / (4 * PIECE_BYTES)
            counting.cancel()
            assert b.process.gateway.held.total == 80 * MIB
            assert uploads(b) == 0
            for raw in clients:
                await raw.close()
            await until(lambda: b.process.gateway.held.total == 0)

    run(scenario())


def test_frames_for_which_there_is_no_memory_wait_in_order(configure: Configure) -> None:
    async def scenario() -> None:
        media = {"max_request_bytes": MIB, "max_item_bytes": MIB}
        async with bench(configure(media=media, request_bytes=2 * MIB, held_bytes=MIB)) as b:
            first, second, third = [await RawClient.connect(b) for _ in range(3)]
            frame = frame_with(600_000)
            first.writer.write(frame[:300_000])
            await until(lambda: uploads(b) == len(frame) - 4)
            second.writer.write(frame)
            third.writer.write(frame)
            await until(lambda: b.process._server._uploads.waiting)
            await serves(b)
            assert uploads(b) == len(frame) - 4
            first.writer.write(frame[300_000:])
            # Each is held from then on: one more finds no room, and is told.
            for raw in (second, third):
                heard = await raw.hear()
                assert isinstance(heard, Reply)
                assert isinstance(heard.event, ErrorEvent)
                assert heard.event.code == "busy"
            await b.stages.request(1)
            for raw in (first, second, third):
                await raw.close()

    run(scenario())


def test_the_gateway_stops_although_frames_are_coming_and_waiting(configure: Configure) -> None:
    async def scenario() -> None:
        media = {"max_request_bytes": MIB, "max_item_bytes": MIB}
        async with bench(configure(media=media, request_bytes=2 * MIB, held_bytes=MIB)) as b:
            clients = [await RawClient.connect(b) for _ in range(3)]
            for raw in clients:
                raw.writer.write(frame_with(MIB)[: MIB // 2])
            await until(lambda: b.process._server._uploads.waiting)
            await b.process.stop()
            assert uploads(b) == 0
            for raw in clients:
                await raw.close()

    run(scenario())


def test_a_frame_that_comes_too_slowly_is_given_up(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.held.UPLOAD_GRACE_S", 0.1)
    monkeypatch.setattr("gateway.held.MIN_UPLOAD_BYTES_PER_S", 2**30)

    async def scenario() -> None:
        async with bench(configure()) as b:
            raw = await RawClient.connect(b)
            raw.writer.write(frame_with(MIB)[:MIB])
            heard = await raw.hear()
            assert isinstance(heard, Refused)
            assert "did not come in" in heard.message
            assert await raw.closed()
            await raw.close()
            assert uploads(b) == 0
            await serves(b)

    run(scenario())


def test_decoding_holds_up_no_other_client_and_keeps_nothing_of_who_gave_up(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    decoded: list[str] = []

    def slow(name: str, url: str, max_bytes: int) -> bytearray:
        decoded.append(url)
        begun.set()
        go_on.wait(10)
        return decode_data_url(name, url, max_bytes)

    monkeypatch.setattr("gateway.media.decode_data_url", slow)

    async def scenario() -> None:
        async with bench(configure()) as b, b.client() as client, b.client() as other:
            try:
                first = client.chat(images="data:,1")
                await until(begun.is_set)
                assert (await other.status()).ready
                waiting = client.chat(images="data:,2")
                await until(lambda: b.process.gateway.held.total == 14)
                waiting.cancel()
                with pytest.raises(errors.CancelledRequestError):
                    await waiting.result()
                first.cancel()
                with pytest.raises(errors.CancelledRequestError):
                    await first.result()
                assert b.process.gateway.held.total == 0
            finally:
                go_on.set()
            await serves(b)
            assert decoded == ["data:,1"]

    run(scenario())


def test_a_long_url_is_refused_by_its_size(configure: Configure) -> None:
    async def scenario() -> None:
        media = {"max_item_bytes": MIB, "max_request_bytes": 3 * MIB}
        async with bench(configure(media=media, request_bytes=32 * MIB)) as b, b.client() as client:
            for url in ("data:;base64," + "A" * 20 * MIB, "data:," + "%41" * 5 * MIB):
                with pytest.raises(errors.MediaTooLargeError, match=r"image 1: .* at most 1048576"):
                    await client.chat(images=url).result()
            with pytest.raises(errors.MediaUnreachableError, match="at most 8192"):
                await client.chat(images="https://example.com/" + "x" * MIB).result()
            with pytest.raises(errors.InvalidRequestError, match="the gateway reads at most"):
                client.chat(images="data:," + "x" * 32 * MIB)
            with pytest.raises(errors.MediaError, match="not ASCII"):
                await client.chat([ChatMessage("user", [image("data:,\u00e9"), TextPart("Hi")])]).result()
            await serves(b)

    run(scenario())

"""What clients have sent, and nobody has processed, is counted, and returned however it ends."""

import asyncio
import base64
import json
from contextlib import suppress
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from gateway.http.realtime.events import ClientEvent
from gateway.http.realtime.responses import Responses
from gateway.http.realtime.session import Session
from omnirelay.protocol import MAX_PIECE_BYTES, Piece
from shared.http.protocol import READ_BYTES
from tests.gateway.bench import Bench, Configure, RawClient
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway
from tests.gateway.realtime import TONE, idle

MIB = 2**20
ASK: dict[str, Any] = {"type": "response.create", "model": "omnirelay", "input": "Hi"}


def uploads(b: Bench) -> int:
    return b.process._server._uploads.used


def held(b: Bench) -> int:
    return b.process.gateway.held.total


async def dial(b: HttpBench, path: str) -> ClientConnection:
    return await connect(b.url.replace("http:", "ws:") + path, ping_interval=None, max_size=None)


async def say(socket: ClientConnection, **message: Any) -> int:
    text = json.dumps(message)
    await socket.send(text)
    return len(text)


async def test_small_uploads_of_one_connection_are_counted_together(tcp: Bench) -> None:
    """64 of 256 KiB each were not, on each of 410 connections."""
    client = await RawClient.connect(tcp)
    for number in range(40):
        client.say(Piece(number, 0, bytes(MAX_PIECE_BYTES)))
    await until(lambda: uploads(tcp) == 40 * MAX_PIECE_BYTES)
    await client.close()
    await until(lambda: uploads(tcp) == 0)


async def test_responses_that_wait_for_another_are_counted(web: HttpBench) -> None:
    socket = await dial(web, "/v1/responses")
    await say(socket, **ASK)
    first = await web.stages.request(0)
    # One waits, one waits to wait, and one is not taken.
    sizes = [await say(socket, **ASK, instructions="x" * MIB) for _ in range(3)]
    await until(lambda: held(web) == sum(sizes[:2]))
    # Its head may have come with the end of the one before.
    await until(lambda: uploads(web) > sizes[2] - READ_BYTES)
    socket.transport.abort()
    await web.stages.answer(first, web.encode("Hello"))
    await idle(web)
    await until(lambda: uploads(web) == 0)


async def test_a_response_for_which_memory_is_short_is_refused(configure: Configure) -> None:
    config = configure(http_gateway(), {"max_request_bytes": MIB, "max_item_bytes": MIB}, held_bytes=2 * MIB)
    async with http_bench(config) as b:
        socket = await dial(b, "/v1/responses")
        await say(socket, **ASK)
        first = await b.stages.request(0)
        for _ in range(2):
            await say(socket, **ASK, instructions="x" * (3 * MIB // 2))
        while (event := json.loads(await socket.recv()))["type"] != "error":
            pass
        assert event["code"] == "busy"
        await b.stages.answer(first, b.encode("Hello"))
        await socket.close()
        await idle(b)


async def test_a_message_that_nobody_takes_is_dropped_where_memory_is_short(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fairness.uploads.RECENT_S", 0.1)
    config = configure(http_gateway(), {"max_request_bytes": MIB, "max_item_bytes": MIB}, held_bytes=3 * MIB)
    async with http_bench(config) as b:
        socket = await dial(b, "/v1/responses")
        await say(socket, **ASK)
        first = await b.stages.request(0)
        for size in (1, 1, 2 * MIB):
            await say(socket, **ASK, instructions="x" * size)
        room = b.process._server._uploads
        await until(lambda: room.used > MIB and all(each.speed() < 2**17 for each in room._uploads))
        other = await RawClient.connect(b)
        for at in range(0, 2 * MIB, MAX_PIECE_BYTES):
            other.say(Piece(1, at, bytes(MAX_PIECE_BYTES)))
        await until(lambda: room.used == 2 * MIB)
        with suppress(ConnectionClosed):
            while True:
                await socket.recv()
        await b.stages.answer(first, b.encode("Hello"))
        await other.close()
        await idle(b)


async def test_texts_that_wait_to_be_spoken_are_counted(web: HttpBench) -> None:
    socket = await dial(web, "/v1/audio/speech/stream")
    await say(socket, type="session.config")
    await say(socket, type="input.text", text="A sentence that is long enough to be spoken. ")
    await web.stages.request(0)
    text = "\N{SNOWMAN WITHOUT SNOW}" * 30_000
    for _ in range(3):
        await say(socket, type="input.text", text=text)
    await until(lambda: held(web) == 3 * 4 * len(text))
    socket.transport.abort()
    await idle(web)


async def test_an_event_of_a_session_is_counted_while_it_is_processed(
    web: HttpBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, seen = Session.handle, list[int]()

    async def watched(session: Session, event: ClientEvent) -> None:
        seen.append(held(web))
        await handle(session, event)

    monkeypatch.setattr(Session, "handle", watched)
    socket = await dial(web, "/v1/realtime")
    part = {"type": "input_text", "text": "x" * MIB}
    item = {"type": "message", "role": "user", "content": [part]}
    size = await say(socket, type="conversation.item.create", item=item)
    while json.loads(await socket.recv())["type"] != "conversation.item.done":
        pass
    assert seen == [size]
    # The item has its text twice: for the model, and for clients.
    await until(lambda: held(web) < 2 * MIB + 100)
    await socket.close()
    await idle(web)


async def test_a_recording_that_does_not_become_an_item_is_returned(
    web: HttpBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends while the answer is interrupted that the recording interrupts."""
    sessions, waiting = list[Session](), asyncio.Event()
    begin = Session.begin

    async def begun(session: Session, told: dict[str, Any] | None = None) -> None:
        sessions.append(session)
        await begin(session, told)

    async def interrupt(_: Responses) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Session, "begin", begun)
    monkeypatch.setattr(Responses, "interrupt", interrupt)
    socket = await dial(web, "/v1/realtime")
    await say(socket, type="input_audio_buffer.append", audio=base64.b64encode(TONE).decode())
    await say(socket, type="input_audio_buffer.commit")
    await waiting.wait()
    assert held(web)
    sessions[0].too_slow.set()
    await idle(web)

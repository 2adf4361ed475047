"""OpenAI's own realtime client against the gateway: conversations, interruptions, errors, limits."""

import asyncio
import base64
import io
import json
import logging
import wave
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import numpy as np
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidStatus

from gateway.http.realtime.endpoint import RealtimeApi
from tests.gateway.bench import Configure, run
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import (
    MODEL,
    HttpBench,
    cut,
    decoded,
    http_bench,
    http_gateway,
    melody,
    speaking,
)
from tests.support.ports import free_ports

SAID = melody(1.2)
CHUNKS = cut(SAID, [5760, 11520])
ANSWER = "How are you? 😀"
TONE = (np.sin(np.arange(12_000) / 20) * 8000).astype("<i2").tobytes()
PUSH_TO_TALK: Any = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}
HELLO: Any = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
TWICE: Any = {**HELLO, "id": "item_twice"}


@asynccontextmanager
async def talking(b: HttpBench, **how: Any) -> AsyncIterator[AsyncRealtimeConnection]:
    async with b.ai.realtime.connect(model=MODEL, **how) as connection:
        created = await receive(connection)
        assert created.type == "session.created"
        assert created.session.audio.input.turn_detection.type == "server_vad"
        # These clients say themselves when the user has finished.
        await connection.session.update(session=PUSH_TO_TALK)
        await take(connection, "session.updated")
        yield connection


async def take(connection: AsyncRealtimeConnection, last: str) -> list[Any]:
    """The events up to the first of this type."""
    events: list[Any] = []
    while not events or events[-1].type != last:
        events.append(await receive(connection))
    return events


async def receive(connection: AsyncRealtimeConnection) -> Any:
    """One event, which has to be valid for the client's model of its type, and an id."""
    event: Any = await connection.recv()
    assert type(event).__name__ != "BaseModel"
    assert event.event_id
    type(event).model_validate(event.to_dict(), strict=True)
    return event


async def ask(connection: AsyncRealtimeConnection, **response: Any) -> list[Any]:
    await connection.response.create(response=response or None)  # type: ignore[arg-type]
    return await take(connection, "response.done")


def of_type(events: list[Any], kind: str) -> list[Any]:
    return [event for event in events if event.type == kind]


async def idle(b: HttpBench) -> None:
    """Nothing is held for anybody any more."""
    await until(lambda: not b.process.gateway._active and b.process.gateway.held.total == 0, "nothing held")


async def test_a_spoken_answer_to_a_typed_question(web: HttpBench) -> None:
    async with speaking(web, ANSWER, CHUNKS):
        async with talking(web, websocket_connection_options={"subprotocols": ["realtime"]}) as c:
            await c.session.update(
                session={
                    "type": "realtime",
                    "instructions": "Be brief.",
                    "max_output_tokens": 50,
                    "audio": {"output": {"voice": "Ethan"}},
                }
            )
            updated = await c.recv()
            assert updated.type == "session.updated"
            assert updated.session.type == "realtime"
            assert updated.session.instructions == "Be brief."
            await c.conversation.item.create(item=HELLO)
            added, done = await take(c, "conversation.item.done")
            assert added.item.content[0].text == done.item.content[0].text == "Hello"
            events = await ask(c)
        kinds = [event.type for event in events]
        assert list(dict.fromkeys(kinds)) == [
            "response.created",
            "response.output_item.added",
            "conversation.item.added",
            "response.content_part.added",
            "response.output_audio_transcript.delta",
            "response.output_audio.delta",
            "response.output_audio.done",
            "response.output_audio_transcript.done",
            "response.content_part.done",
            "conversation.item.done",
            "response.output_item.done",
            "response.done",
        ]
        deltas = of_type(events, "response.output_audio.delta")
        pieces = [base64.b64decode(event.delta, validate=True) for event in deltas]
        assert [len(piece) for piece in pieces] == [2 * chunk.size for chunk in CHUNKS]
        assert np.abs(decoded(b"".join(pieces), "pcm16") - SAID).max() < 1e-4
        words = of_type(events, "response.output_audio_transcript.delta")
        assert "".join(event.delta for event in words) == ANSWER
        response = events[-1].response
        assert (response.status, response.output[0].content[0].transcript) == ("completed", ANSWER)
        tokens = len(web.encode(ANSWER))
        assert response.usage.output_tokens == tokens + 10
        assert response.usage.input_token_details.cached_tokens == 3
        request = web.stages.requests[0]
        assert request.speech is not None
        assert (request.speech.speaker, request.sampling.max_tokens) == ("Ethan", 50)
        await idle(web)


async def test_what_is_said_reaches_the_thinker_and_the_whole_conversation_with_it(
    web: HttpBench,
) -> None:
    async with speaking(web, ANSWER, CHUNKS), talking(web) as c:
        # Without instructions text and speech have different system messages, and no common beginning.
        await c.session.update(session={"type": "realtime", "instructions": "Be brief."})
        await take(c, "session.updated")
        for piece in (TONE[:9001], TONE[9001:]):
            await c.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
        await c.input_audio_buffer.commit()
        committed, added, _ = await take(c, "conversation.item.done")
        assert committed.item_id == added.item.id
        assert added.item.content[0].type == "input_audio"
        await ask(c, output_modalities=["text"])
        [item] = web.stages.requests[0].media
        with wave.open(io.BytesIO(bytes(item.data.view))) as file:
            assert file.getparams()[:3] == (1, 2, 24_000)
            assert file.readframes(file.getnframes()) == TONE
        assert web.stages.requests[0].speech is None
        picture = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
        sound = {"type": "input_audio", "audio": base64.b64encode(TONE).decode()}
        shown: Any = {"type": "message", "role": "user", "content": [picture, sound]}
        await c.conversation.item.create(item=shown)
        events = await ask(c)
        again = web.stages.requests[1]
        assert [item.kind for item in again.media] == ["audio", "image", "audio"]
        first = web.stages.requests[0].prompt_token_ids
        # The earlier prompt is the beginning of this one: the prefix cache serves it.
        assert again.prompt_token_ids[: len(first)] == first
        assert of_type(events, "conversation.item.added")[0].previous_item_id
        await c.conversation.item.delete(item_id=added.item.id)
        assert (await take(c, "conversation.item.deleted"))[-1].item_id == added.item.id
        await ask(c)
        assert [item.kind for item in web.stages.requests[2].media] == ["image", "audio"]
        await ask(c, conversation="none", input=[HELLO], metadata={"a": "b"})
        assert web.stages.requests[3].media == []


@pytest.mark.parametrize("how", ["cancel", "create", "commit", "leave"])
async def test_an_interruption_reaches_every_stage(web: HttpBench, how: str) -> None:
    async with talking(web) as c:
        await c.conversation.item.create(item=HELLO)
        await take(c, "conversation.item.done")
        await c.response.create()
        request = await web.stages.request(0)
        await web.stages.text(request.request_id, 0, web.encode("One two"))
        await web.stages.audio(request.request_id, 0, CHUNKS[0].tobytes())
        await take(c, "response.output_audio.delta")
        if how == "cancel":
            await c.response.cancel()
        if how == "create":
            await c.response.create()
        if how == "commit":
            await c.input_audio_buffer.append(audio=base64.b64encode(TONE).decode())
            await c.input_audio_buffer.commit()
        if how != "leave":
            done = (await take(c, "response.done"))[-1].response
            assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
            assert done.output[0].status == "incomplete"
            assert done.output[0].content[0].transcript == "One two"
            # Clients add up the tokens of every response.
            assert done.usage.input_tokens == len(request.prompt_token_ids)
            assert done.usage.output_token_details.text_tokens == len(web.encode("One two"))
            assert done.usage.input_token_details is not None
            report = await web.http.get(f"/v1/requests/{request.request_id}")
            assert report.json()["state"] == "cancelled"
        if how == "create":
            second = await web.stages.request(1)
            assert len(second.prompt_token_ids) > len(request.prompt_token_ids)
            await c.response.cancel()
            await take(c, "response.done")
            await web.stages.aborted(second.request_id)
    await web.stages.aborted(request.request_id)
    await idle(web)


async def test_truncating_forgets_what_was_not_heard(configure: Configure) -> None:
    words = "one two three four five six"
    async with http_bench(configure(http_gateway())) as b, speaking(b, words, CHUNKS), talking(b) as c:
        await c.conversation.item.create(item=HELLO)
        events = await ask(c)
        item = events[-1].response.output[0]
        await c.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=9000)
        [error] = (await take(c, "error"))[-1:]
        assert (error.error.param, "1200 ms" in error.error.message) == ("audio_end_ms", True)
        await c.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=600)
        await take(c, "conversation.item.truncated")
        await c.conversation.item.create(item=HELLO)
        await ask(c)
        prompt = b.stages.requests[1].prompt_token_ids
        text = b.process._prompts._tokenizer.decode(prompt, skip_special_tokens=False)
        assert "one two three" in text
        assert "four" not in text


def test_errors_are_told_and_the_session_goes_on(configure: Configure) -> None:
    refused: list[tuple[Any, str, str | None]] = [
        ("no json", "invalid_request", None),
        ({"type": "session.nothing"}, "invalid_request", "type"),
        ({"type": "conversation.item.retrieve", "item_id": "x"}, "item_retrieve_invalid_item_id", "item_id"),
        ({"type": "input_audio_buffer.append", "audio": "?"}, "invalid_request", "audio"),
        ({"type": "input_audio_buffer.append", "sound": "aGk="}, "invalid_request", "sound"),
        ({"type": "input_audio_buffer.commit"}, "input_audio_buffer_commit_empty", None),
        ({"type": "response.cancel"}, "response_cancel_not_active", None),
        ({"type": "conversation.item.delete", "item_id": "x"}, "item_delete_invalid_item_id", "item_id"),
        (
            {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": 0},
            "item_truncate_invalid_item_id",
            "item_id",
        ),
        ({"type": "conversation.item.create", "item": TWICE}, "item_create_duplicate_item_id", "item.id"),
        ({"type": "conversation.item.create", "item": {"type": "mcp_call"}}, "unsupported", "item.type"),
        (
            {"type": "response.create", "response": {"tools": [{"type": "mcp"}]}},
            "unsupported",
            "response.tools[0].type",
        ),
        (
            {"type": "response.create", "response": {"turn_detection": {"type": "server_vad"}}},
            "unsupported",
            "response.audio.input.turn_detection",
        ),
    ]
    for session, code, param in [
        (
            {"audio": {"input": {"format": {"type": "audio/opus"}}}},
            "invalid_request",
            "audio.input.format.type",
        ),
        ({"voice": "Nobody"}, "unknown_speaker", "session.audio.output.voice"),
        ({"temperature": 9}, "invalid_request", "temperature"),
        ({"model": "gpt-realtime"}, "model_not_found", "model"),
        ({"output_modalities": ["smell"]}, "unsupported", "session.output_modalities"),
        ({"type": "translation"}, "invalid_request", "type"),
        ({"output_modalities": []}, "unsupported", "session.output_modalities"),
        ({"max_output_tokens": 0}, "invalid_request", "session.max_output_tokens"),
        ({"max_output_tokens": -1}, "invalid_request", "session.max_output_tokens"),
    ]:
        refused.append(({"type": "session.update", "session": session}, code, param))

    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b, speaking(b, ANSWER, CHUNKS), talking(b) as c:
            await c.conversation.item.create(item=TWICE)
            await take(c, "conversation.item.done")
            for at, (event, code, param) in enumerate(refused):
                if isinstance(event, str):
                    await c._connection.send(event)
                else:
                    named: Any = {**event, "event_id": f"mine_{at}"}
                    await c.send(named)
                [told] = await take(c, "error")
                assert told.error.code == code, event
                assert told.error.message
                # LiveKit knows it by its message.
                cancelled = told.error.message.startswith("Cancellation failed")
                assert cancelled == (code == "response_cancel_not_active")
                if param is not None:
                    assert told.error.param == param
                assert told.error.event_id == (None if isinstance(event, str) else f"mine_{at}")
            await c.conversation.item.delete(item_id=TWICE["id"])
            await take(c, "conversation.item.deleted")
            # An empty conversation cannot be answered: the response fails, and says why.
            failed = (await ask(c))[-1].response
            assert (failed.status, failed.status_details.error.code) == ("failed", "prompt_empty")
            beta: Any = {"type": "session.update", "session": {"modalities": ["text"], "voice": "Ethan"}}
            await c.send(beta)
            assert (await take(c, "session.updated"))[-1].session.output_modalities == ["text"]
            await c.conversation.item.create(item=HELLO)
            assert (await ask(c))[-1].response.output[0].content[0].text == ANSWER

    run(scenario())


async def test_a_session_gets_what_there_is_and_is_told_what_is_not(configure: Configure) -> None:
    """As openai-agents and livekit-agents begin every session."""
    wanted: Any = {
        "type": "realtime",
        "instructions": "Be kind.",
        "tracing": "auto",
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": 24000},
                "transcription": {"model": "gpt-4o-mini-transcribe"},
                "turn_detection": {"type": "semantic_vad"},
                "noise_reduction": {"type": "near_field"},
            },
            "output": {"voice": "ash", "speed": 1.5},
        },
    }

    async with http_bench(configure(http_gateway())) as b, speaking(b, ANSWER, CHUNKS), talking(b) as c:
        for session in (wanted, {"turn_detection": None}):
            update: Any = {"type": "session.update", "session": session}
            await c.send(update)
            updated: Any = (await take(c, "session.updated"))[-1]
            told = {each["param"] for each in updated.warnings}
            listening = "session.audio.input"
            if session is wanted:
                assert told == {f"{listening}.noise_reduction"}
                assert updated.session.audio.output.speed == 1.5
                assert updated.session.audio.input.transcription.model == "gpt-4o-mini-transcribe"
                assert updated.session.audio.input.turn_detection.type == "semantic_vad"
            else:
                assert updated.session.audio.input.turn_detection is None
            assert all(each["message"] for each in updated.warnings)
            assert updated.session.instructions == "Be kind."
        await c.conversation.item.create(item=HELLO)
        assert (await ask(c))[-1].response.status == "completed"
        [request] = b.stages.requests
        assert request.speech is not None
        assert request.speech.speaker == "Ethan"
        update = {"type": "session.update", "session": {"instructions": "Be brief."}}
        await c.send(update)
        updated = (await take(c, "session.updated"))[-1]
        assert updated.warnings == []


async def test_a_full_buffer_forgets_its_oldest_audio(configure: Configure) -> None:
    async with http_bench(configure(http_gateway(), {"max_audio_seconds": 1.0})) as b, talking(b) as c:
        sound = np.arange(1, 30_001, dtype="<i2").tobytes()
        for at in range(0, len(sound), 999):
            await c.input_audio_buffer.append(audio=base64.b64encode(sound[at : at + 999]).decode())
        await c.input_audio_buffer.commit()
        await take(c, "conversation.item.done")
        await c.response.create()
        [media] = (await b.stages.request(0)).media
        with wave.open(io.BytesIO(bytes(media.data.view))) as heard:
            kept = heard.readframes(heard.getnframes())
        assert sound.endswith(kept)
        assert 44_000 < len(kept) <= 48_000


async def test_limits(configure: Configure) -> None:
    media = {"max_audio_seconds": 1.0, "max_audios": 2}
    async with http_bench(configure(http_gateway(), media)) as b, speaking(b, ANSWER, CHUNKS):
        async with talking(b) as c:
            await c.input_audio_buffer.append(audio=base64.b64encode(bytes(48_001)).decode())
            [error] = await take(c, "error")
            assert error.error.code == "media_too_large"
            await c.input_audio_buffer.append(audio=base64.b64encode(bytes(48_000)).decode())
            await c.input_audio_buffer.commit()
            first = (await take(c, "conversation.item.done"))[-1].item.id
            for _ in "12":
                await c.input_audio_buffer.append(audio=base64.b64encode(TONE).decode())
                await c.input_audio_buffer.commit()
                events = await take(c, "conversation.item.done")
            # A request may have two sounds: the oldest is forgotten, and the client is told.
            assert [event.item_id for event in of_type(events, "conversation.item.deleted")] == [first]
            await ask(c)
            assert len(b.stages.requests[0].media) == 2
            with pytest.raises(ConnectionClosed):
                await asyncio.gather(c._connection.send("x" * (17 * 2**20)), take(c, "never"))
        await idle(b)


async def test_who_may_not_come_is_told_why(web: HttpBench) -> None:
    url = web.url.replace("http:", "ws:") + "/v1/realtime"
    with pytest.raises(InvalidStatus) as unknown:
        await connect(f"{url}?model=gpt-realtime")
    assert unknown.value.response.status_code == 404
    assert b"model_not_found" in (unknown.value.response.body or b"")
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        with pytest.raises(InvalidStatus) as elsewhere:
            await connect(url, additional_headers=headers)
        assert elsewhere.value.response.status_code in (400, 403)


UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\n"
)
SECRET = b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
HANDSHAKE = UPGRADE + SECRET


def masked(opcode: int, data: bytes) -> bytes:
    """A frame as clients send it, masked with zeros."""
    return bytes([0x80 | opcode, 0x80 | len(data), 0, 0, 0, 0]) + data


@pytest.mark.parametrize(
    ("handshake", "status", "frame"),
    [
        (UPGRADE + b"\r\n", 400, b""),
        (HANDSHAKE.replace(b"/realtime", b"/realtime?model=gpt"), 404, b""),
        (HANDSHAKE.replace(b"/v1/realtime", b"/v1/nowhere"), 404, b""),
        (UPGRADE + b"Origin: https://evil.example\r\n" + SECRET, 403, b""),
        (HANDSHAKE.replace(b"localhost", b"evil.example"), 403, b""),
        (HANDSHAKE, 101, masked(1, b"\xff")),
        (HANDSHAKE, 101, masked(3, b"?")),
    ],
    ids=["key missing", "model", "path", "origin", "host", "no UTF-8", "no frame"],
)
async def test_what_a_client_does_is_no_error_of_ours(
    configure: Configure, caplog: pytest.LogCaptureFixture, handshake: bytes, status: int, frame: bytes
) -> None:
    async with http_bench(configure(http_gateway())) as b:
        reader, writer = await asyncio.open_connection(*b.address)
        with closing(writer):
            writer.write(handshake)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == str(status).encode()
            writer.write(frame)
            body = await reader.read()
        if status in (403, 404):
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_the_gateways_end_is_the_sessions_end(web: HttpBench) -> None:
    async with web.ai.realtime.connect(model=MODEL) as c:
        await c.recv()
        await c.conversation.item.create(item=HELLO)
        await c.response.create()
        request = await web.stages.request(0)
        stopping = asyncio.create_task(web.process.stop())
        with pytest.raises(ConnectionClosed):
            await take(c, "never")
        await stopping
    assert web.counts["cancelled"] == 1
    assert request.request_id


async def test_other_hosts_are_refused_everywhere(configure: Configure) -> None:
    origins = {"http_origins": ["https://chat.example"]}
    async with http_bench(configure(http_gateway(**origins))) as b:
        port = b.address[1]
        for host, status in [
            ("evil.example", 403),
            (f"127.0.0.1.evil.example:{port}", 403),
            ("[::1]:80", 200),
            (f"LOCALHOST:{port}", 200),
            ("127.9.9.9", 200),
            ("chat.example", 200),
        ]:
            answer = await b.http.get("/v1/models", headers={"Host": host})
            assert answer.status_code == status, host
            assert status == 200 or answer.json()["error"]["code"] == "origin_refused"


@pytest.mark.parametrize(
    ("hosts", "statuses"),
    [
        (None, {"evil.example": 200}),
        ([], {"evil.example": 403, "192.0.2.1": 403, "localhost": 200, "127.0.0.1": 200}),
        (["gateway", "2001:db8::1"], {"evil.example": 403, "gateway": 200, "[2001:DB8::1]": 200}),
    ],
)
async def test_a_gateway_that_others_reach_answers_for_the_hosts_that_it_is_given(
    configure: Configure, hosts: list[str] | None, statuses: dict[str, int]
) -> None:
    anywhere = f"tcp://0.0.0.0:{free_ports(1)[0]}"
    async with http_bench(configure({"http": anywhere, "http_hosts": hosts})) as b:
        for host, status in statuses.items():
            answer = await b.http.get("/livez", headers={"Host": f"{host}:{b.address[1]}"})
            assert answer.status_code == status, host


async def test_an_idle_client_is_let_go_and_a_busy_one_is_not(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for a busy machine between two words of the client.
    monkeypatch.setattr(RealtimeApi.__init__, "__defaults__", (2.0,))

    async with http_bench(configure(http_gateway())) as b, talking(b) as c:
        await c.conversation.item.create(item=HELLO)
        await c.response.create()
        request = await b.stages.request(0)
        await asyncio.sleep(2.5)
        await b.stages.fail(request.request_id, "talker", "stage_failed", "it broke")
        done = (await take(c, "response.done"))[-1].response
        assert (done.status, "it broke" in done.status_details.error.message) == ("failed", True)
        with pytest.raises(ConnectionClosedOK):
            await take(c, "never")


async def test_a_client_that_does_not_read_is_hung_up_on(configure: Configure) -> None:
    config = configure(http_gateway(), client_backlog_bytes=2**20)
    async with http_bench(config) as b:
        options: Any = {"max_queue": 1, "ping_interval": None}
        async with b.ai.realtime.connect(model=MODEL, websocket_connection_options=options) as c:
            await c.recv()
            await c.conversation.item.create(item=HELLO)
            await c.response.create()
            request = await b.stages.request(0)
            for seq in range(200):
                await b.stages.audio(request.request_id, seq, bytes(96_000))
            await b.stages.aborted(request.request_id)
            # What was sent before it was given up is there to read; then comes the end.
            with pytest.raises(ConnectionClosed) as closed:
                await take(c, "never")
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.reason == "client_too_slow"
        await idle(b)

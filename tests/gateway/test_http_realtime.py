"""OpenAI's own realtime client against the gateway: conversations, interruptions, errors, limits."""

import asyncio
import base64
import json
import logging
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

from tests.gateway.bench import Configure, Log, Patch
from tests.gateway.http_bench import MODEL, HttpBench, decoded, http_bench, http_gateway, speak, speaking
from tests.gateway.realtime import (
    ANSWER,
    CHUNKS,
    HELLO,
    PIECE,
    SAID,
    TONE,
    add,
    append,
    ask,
    begin,
    commit,
    detect,
    error_of,
    idle,
    of_type,
    picture,
    recording,
    say,
    take,
    talking,
    update,
)

TWICE: Any = {**HELLO, "id": "item_twice"}


async def test_a_spoken_answer_to_a_typed_question(web: HttpBench, answers: None) -> None:
    async with talking(web, websocket_connection_options={"subprotocols": ["realtime"]}) as c:
        brief = {"instructions": "Be brief.", "max_output_tokens": 50, "type": "realtime"}
        shown = (await update(c, **brief, audio={"output": {"voice": "Ethan"}})).session
        assert (shown.type, shown.instructions) == ("realtime", "Be brief.")
        await c.conversation.item.create(item=HELLO)
        added, done = await take(c, "conversation.item.done")
        assert added.item.content[0].text == done.item.content[0].text == "Hello"
        events = await ask(c)
    assert list(dict.fromkeys(event.type for event in events)) == [
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
    assert response.usage.output_tokens == len(web.encode(ANSWER)) + 10
    assert response.usage.input_token_details.cached_tokens == 3
    request = web.stages.requests[0]
    assert request.speech is not None
    assert (request.speech.speaker, request.sampling.max_tokens) == ("Ethan", 50)
    await idle(web)


async def test_the_whole_conversation_reaches_the_thinker(
    web: HttpBench, answers: None, c: Connection
) -> None:
    # Without instructions text and speech have different system messages, and no common beginning.
    await update(c, instructions="Be brief.")
    await append(c, TONE, piece=9001)
    await c.input_audio_buffer.commit()
    committed, added, _ = await take(c, "conversation.item.done")
    assert committed.item_id == added.item.id
    assert added.item.content[0].type == "input_audio"
    await ask(c, output_modalities=["text"])
    first = web.stages.requests[0]
    assert [recording(item) for item in first.media] == [TONE]
    assert first.speech is None
    sound = {"type": "input_audio", "audio": base64.b64encode(TONE).decode()}
    shown: Any = {"type": "message", "role": "user", "content": [picture(), sound]}
    await c.conversation.item.create(item=shown)
    events = await ask(c)
    again = web.stages.requests[1]
    assert [item.kind for item in again.media] == ["audio", "image", "audio"]
    # The earlier prompt is the beginning of this one: the prefix cache serves it.
    assert again.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
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
        request = await begin(web, c)
        await web.stages.text(request.request_id, 0, web.encode("One two"))
        await web.stages.audio(request.request_id, 0, CHUNKS[0].tobytes())
        await take(c, "response.output_audio.delta")
        if how == "commit":
            await append(c, TONE)
            await c.input_audio_buffer.commit()
        elif how != "leave":
            await getattr(c.response, how)()
        if how != "leave":
            done = (await take(c, "response.done"))[-1].response
            assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")
            assert (done.output[0].status, done.output[0].content[0].transcript) == ("incomplete", "One two")
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


REFUSED: list[tuple[Any, str, str | None]] = [
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
]
for _type, _field in (("session.update", "session"), ("response.create", "response")):
    REFUSED += [
        ({"type": _type, _field: {"tools": "weather"}}, "invalid_request", f"{_field}.tools"),
        ({"type": _type, _field: {"voice": "Nobody"}}, "unknown_speaker", f"{_field}.audio.output.voice"),
        ({"type": _type, _field: {"model": "gpt-realtime"}}, "model_not_found", f"{_field}.model"),
    ]
# What is not supported is warned of, unless all else depends on it.
_settings = {"output_modalities": ["smell"]}
REFUSED.append(({"type": "session.update", "session": _settings}, "unsupported", "session.output_modalities"))
_late = {"item": HELLO, "previous_item_id": "x"}
REFUSED.append(({"type": "conversation.item.create", **_late}, "invalid_request", "previous_item_id"))
_tools = {"tools": [{"type": "mcp"}]}
REFUSED.append(({"type": "response.create", "response": _tools}, "unsupported", "response.tools[0].type"))


async def test_errors_are_told(web: HttpBench, answers: None, c: Connection) -> None:
    await add(c, TWICE)
    for at, (event, code, param) in enumerate(REFUSED):
        if isinstance(event, str):
            await c._connection.send(event)
        else:
            await say(c, event_id=f"mine_{at}", **event)
        [told] = await take(c, "error")
        assert told.error.code == code, event
        assert told.error.message
        # LiveKit knows it by its message.
        cancelled = told.error.message.startswith("Cancellation failed")
        assert cancelled == (code == "response_cancel_not_active")
        assert param in (None, told.error.param)
        assert told.error.event_id == (None if isinstance(event, str) else f"mine_{at}")
    await c.conversation.item.delete(item_id=TWICE["id"])
    await take(c, "conversation.item.deleted")
    # An empty conversation cannot be answered: the response fails, and says why.
    failed = (await ask(c))[-1].response
    assert (failed.status, failed.status_details.error.code) == ("failed", "prompt_empty")
    beta = await update(c, modalities=["text"], voice="Ethan")
    assert beta.session.output_modalities == ["text"]
    await add(c)
    assert (await ask(c))[-1].response.output[0].content[0].text == ANSWER


async def test_a_session_gets_what_there_is(web: HttpBench, answers: None, c: Connection) -> None:
    """As openai-agents and livekit-agents begin every session."""
    listening = {
        "format": {"type": "audio/pcm", "rate": 24000},
        "transcription": {"model": "gpt-4o-mini-transcribe"},
        "turn_detection": {"type": "semantic_vad"},
        "noise_reduction": {"type": "near_field"},
    }
    updated = await update(
        c,
        type="realtime",
        instructions="Be kind.",
        tracing="auto",
        tools=[{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
        tool_choice="auto",
        audio={"input": listening, "output": {"voice": "ash", "speed": 1.5}},
    )
    assert {each["param"] for each in updated.warnings} == {"session.audio.input.noise_reduction"}
    assert all(each["message"] for each in updated.warnings)
    heard = updated.session.audio.input
    assert heard.transcription.model == "gpt-4o-mini-transcribe"
    assert heard.turn_detection.type == "semantic_vad"
    assert updated.session.audio.output.speed == 1.5
    updated = await update(c, turn_detection=None)
    assert (updated.session.audio.input.turn_detection, updated.warnings) == (None, [])
    assert updated.session.instructions == "Be kind."
    await add(c)
    assert (await ask(c))[-1].response.status == "completed"
    [request] = web.stages.requests
    assert request.speech is not None
    assert request.speech.speaker == "Ethan"
    assert (await update(c, instructions="Be brief.")).warnings == []


async def test_a_full_buffer_forgets_its_oldest_audio(configure: Configure) -> None:
    async with http_bench(configure(http_gateway(), {"max_audio_seconds": 1.0})) as b, talking(b) as c:
        sound = np.arange(1, 30_001, dtype="<i2").tobytes()
        await append(c, sound, piece=999)
        await commit(c)
        await c.response.create()
        [media] = (await b.stages.request(0)).media
        kept = recording(media)
        assert sound.endswith(kept)
        assert 44_000 < len(kept) <= 48_000
        await append(c, bytes(48_000), piece=48_000)
        # Also while nobody speaks, though turns are detected.
        await detect(c, {"type": "server_vad"})
        await append(c, TONE)
        await say(c, type="session.update", session={})
        assert not of_type(await take(c, "session.updated"), "error")


async def test_limits(configure: Configure) -> None:
    media = {"max_audio_seconds": 1.0, "max_audios": 2}
    async with http_bench(configure(http_gateway(), media)) as b, speaking(b, ANSWER, CHUNKS):
        async with talking(b) as c:
            await append(c, bytes(48_001), piece=48_001)
            assert (await error_of(c)).code == "media_too_large"
            await append(c, bytes(48_000), piece=48_000)
            first = await commit(c)
            await commit(c, TONE)
            await append(c, TONE)
            await c.input_audio_buffer.commit()
            *events, deleted = await take(c, "conversation.item.deleted")
            # A request may have two sounds: the oldest is forgotten. The client is told when it knows the new
            # item, which may come behind the one that is forgotten.
            assert deleted.item_id == first
            assert events[-1].type == "conversation.item.done"
            await ask(c)
            assert len(b.stages.requests[0].media) == 2
            with pytest.raises(ConnectionClosed):
                await asyncio.gather(c._connection.send("x" * (17 * 2**20)), take(c, "never"))
        await idle(b)


UPGRADE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\n"
)
SECRET = b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
HANDSHAKE = UPGRADE + SECRET


def masked(opcode: int, data: bytes) -> bytes:
    """A frame as clients send it, masked with zeros."""
    return bytes([0x80 | opcode, 0x80 | len(data), 0, 0, 0, 0]) + data


FAULTS = {
    "key missing": (UPGRADE + b"\r\n", 400, b""),
    "model": (HANDSHAKE.replace(b"/realtime", b"/realtime?model=gpt"), 404, b""),
    "path": (HANDSHAKE.replace(b"/v1/realtime", b"/v1/nowhere"), 404, b""),
    "origin": (UPGRADE + b"Origin: https://evil.example\r\n" + SECRET, 403, b""),
    "host": (HANDSHAKE.replace(b"localhost", b"evil.example"), 403, b""),
    "no UTF-8": (HANDSHAKE, 101, masked(1, b"\xff")),
    "no frame": (HANDSHAKE, 101, masked(3, b"?")),
}


async def test_a_prompt_that_is_too_long_loses_its_oldest_items(web: HttpBench, c: Connection) -> None:
    said = [await add(c) for _ in range(9)]
    await c.response.create()
    for attempt in range(2):
        request = await web.stages.request(attempt)
        await web.stages.fail(request.request_id, "thinker", "prompt_too_long", "9999 tokens")
    await speak(web, await web.stages.request(2), ANSWER, CHUNKS)
    events = await take(c, "response.done")
    assert events[-1].response.status == "completed"
    # A quarter, and one of the rest.
    assert [each.item_id for each in events if each.type == "conversation.item.deleted"] == said[:3]
    assert [each.type for each in events].count("response.output_item.added") == 1
    prompts = [len(each.prompt_token_ids) for each in web.stages.requests]
    assert prompts[0] - prompts[1] == 2 * (prompts[1] - prompts[2]) > 0
    # A single one cannot be shorter, nor what is asked beside the conversation.
    apart: Any = {"input": [HELLO]}
    nothing: Any = None
    for options in (apart, nothing):
        if options is nothing:
            for item_id in [*said[3:], events[-1].response.output[0].id]:
                await c.conversation.item.delete(item_id=item_id)
            await add(c)
        await c.response.create(response=options)
        request = await web.stages.request(len(web.stages.requests))
        await web.stages.fail(request.request_id, "thinker", "prompt_too_long", "9999 tokens")
        assert (await take(c, "response.done"))[-1].response.status_details.error.code == "prompt_too_long"


async def test_media_that_cannot_be_read_make_one_answer_fail(web: HttpBench, c: Connection) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    text = {"type": "input_text", "text": "Look"}
    for kept in (1, 0):
        await add(c, {"type": "message", "role": "user", "content": [text, image]})
        await c.response.create()
        request = await web.stages.request(len(web.stages.requests))
        assert len(request.media) == 2 - kept
        if kept:
            await speak(web, request, ANSWER, CHUNKS)
        else:
            await web.stages.fail(
                request.request_id, "thinker", "media_invalid", "image 2: the file is damaged"
            )
        await take(c, "response.done")
    async with speaking(web, ANSWER, CHUNKS):
        await ask(c)
    assert len(web.stages.requests[-1].media) == 1


async def test_a_tap_of_the_microphones_button_is_no_recording(c: Connection) -> None:
    for size in (2, PIECE - 4):
        await append(c, bytes(size))
        await c.input_audio_buffer.commit()
        assert (await error_of(c)).code == "input_audio_buffer_commit_empty"
    # What was refused stays in the buffer.
    await commit(c, bytes(2))


async def test_faults_of_clients(web: HttpBench, caplog: Log) -> None:
    for fault, (handshake, status, frame) in FAULTS.items():
        reader, writer = await asyncio.open_connection(*web.address)
        with closing(writer):
            writer.write(handshake)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.split()[1] == str(status).encode(), fault
            writer.write(frame)
            body = await reader.read()
        if status in (403, 404):
            assert set(error := json.loads(body)["error"]) == {"message", "type", "param", "code"}
            assert fault != "model" or error["code"] == "model_not_found"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_the_gateways_end_is_the_sessions_end(web: HttpBench) -> None:
    async with web.ai.realtime.connect(model=MODEL) as c:
        await begin(web, c)
        stopping = asyncio.create_task(web.process.stop())
        with pytest.raises(ConnectionClosed):
            await take(c, "never")
        await stopping
    assert web.counts["cancelled"] == 1


async def test_an_idle_client_is_let_go_and_no_busy_one(configure: Configure, monkeypatch: Patch) -> None:
    # Long enough for a busy machine between two words of the client.
    monkeypatch.setattr("gateway.http.realtime.websocket.IDLE_S", 2.0)

    async with http_bench(configure(http_gateway())) as b, talking(b) as c:
        request = await begin(b, c)
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
            request = await begin(b, c)
            for seq in range(200):
                await b.stages.audio(request.request_id, seq, bytes(96_000))
            await b.stages.aborted(request.request_id)
            # What was sent before it was given up is there to read; then comes the end.
            with pytest.raises(ConnectionClosed) as closed:
                await take(c, "never")
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.reason == "client_too_slow"
        await idle(b)

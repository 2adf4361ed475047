"""Transcripts of what is said in realtime sessions: beside the answers, never before them."""

import base64
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from gateway.http.realtime.input import transcription
from gateway.http.realtime.settings import Settings, refuse
from omnirelay.errors import InvalidRequestError
from shared.config import Config
from tests.gateway.bench import run
from tests.gateway.http_bench import http_bench, http_gateway, speak
from tests.gateway.test_http_realtime import ANSWER, CHUNKS, TONE, idle, of_type, take, talking

Configure = Callable[..., Config]
KIND = "conversation.item.input_audio_transcription"
GA = {"audio": {"input": {"transcription": {"model": "whisper-1", "language": "de", "keywords": ["Ulm"]}}}}
BETA = {"input_audio_transcription": {"model": "gpt-4o-mini-transcribe", "prompt": "Ulm"}}


async def transcribed(c: AsyncRealtimeConnection, session: dict[str, Any]) -> None:
    event: Any = {"type": "session.update", "session": session}
    await c.send(event)
    updated: Any = (await take(c, "session.updated"))[-1]
    assert updated.warnings == []
    assert updated.session.audio.input.transcription.model


async def say(c: AsyncRealtimeConnection) -> str:
    await c.input_audio_buffer.append(audio=base64.b64encode(TONE).decode())
    await c.input_audio_buffer.commit()
    item_id: str = (await take(c, "conversation.item.done"))[-1].item.id
    return item_id


@pytest.mark.parametrize("session", [GA, BETA], ids=["current", "beta"])
def test_a_transcript_after_the_answer(configure: Configure, session: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b, talking(b) as c:
            await transcribed(c, session)
            item_id = await say(c)
            await c.response.create()
            answer = await b.stages.request(0)
            assert answer.speech is not None
            await speak(b, answer, ANSWER, CHUNKS)
            await take(c, "response.done")
            other = await b.stages.request(1)
            assert (other.speech, other.priority) == (None, 1000)
            assert [each.kind for each in other.media] == ["audio"]
            await speak(b, other, " Hello Ulm. ", [])
            delta, done = await take(c, f"{KIND}.completed")
            assert (delta.type, delta.item_id, delta.delta) == (f"{KIND}.delta", item_id, "Hello Ulm.")
            assert (done.item_id, done.content_index, done.transcript) == (item_id, 0, "Hello Ulm.")
            assert (done.usage.type, done.usage.output_tokens > 0) == ("tokens", True)
            await c.conversation.item.retrieve(item_id=item_id)
            item = (await take(c, "conversation.item.retrieved"))[-1].item
            assert item.content[0].transcript == "Hello Ulm."
        await idle(b)

    run(scenario())


def test_an_answer_interrupts_a_transcript_which_is_made_after_it(configure: Configure) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b, talking(b) as c:
            await transcribed(c, GA)
            await say(c)
            interrupted = await b.stages.request(0)
            assert interrupted.speech is None
            await c.response.create()
            await b.stages.aborted(interrupted.request_id)
            answer = await b.stages.request(1)
            assert answer.speech is not None
            await speak(b, answer, ANSWER, CHUNKS)
            assert not of_type(await take(c, "response.done"), f"{KIND}.completed")
            await speak(b, await b.stages.request(2), "Hello", [])
            [delta, done] = await take(c, f"{KIND}.completed")
            assert (delta.delta, done.transcript) == ("Hello", "Hello")
        await idle(b)

    run(scenario())


def test_a_transcript_that_fails_and_one_of_a_deleted_item(configure: Configure) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b, talking(b) as c:
            await transcribed(c, GA)
            item_id = await say(c)
            name = (await b.stages.request(0)).request_id
            await b.stages.fail(name, "thinker", "media_invalid", "no sound")
            [event] = await take(c, f"{KIND}.failed")
            assert (event.item_id, event.content_index) == (item_id, 0)
            assert (event.error.code, event.error.message) == ("media_invalid", "no sound")
            with mock.patch.object(transcription, "PAUSE_S", 0.5):
                deleted = await say(c)
                await c.conversation.item.delete(item_id=deleted)
                await take(c, "conversation.item.deleted")
                kept = await say(c)
            await speak(b, await b.stages.request(1), "", [])
            [done] = await take(c, f"{KIND}.completed")
            assert (done.item_id, done.transcript) == (kept, "")
        await idle(b)

    run(scenario())


def test_a_closed_session_cancels_its_transcript(configure: Configure) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b:
            async with talking(b) as c:
                await transcribed(c, GA)
                await say(c)
                name = (await b.stages.request(0)).request_id
            await b.stages.aborted(name)
            await idle(b)

    run(scenario())


def test_no_transcripts_unless_wanted(configure: Configure) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b, talking(b) as c:
            await transcribed(c, GA)
            event: Any = {"type": "session.update", "session": {"input_audio_transcription": None}}
            await c.send(event)
            updated: Any = (await take(c, "session.updated"))[-1]
            assert updated.session.audio.input.transcription is None
            with mock.patch.object(transcription, "PAUSE_S", 0.0):
                await say(c)
                await c.response.create()
                await speak(b, await b.stages.request(0), ANSWER, CHUNKS)
                await take(c, "response.done")
            assert len(b.stages.requests) == 1
        await idle(b)

    run(scenario())


@pytest.mark.parametrize(
    "values",
    [
        "whisper-1",
        [],
        {"model": 1},
        {"prompt": "x" * 65_537},
        {"keywords": ["x"] * 257},
        {"secret": True},
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_refused(values: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Settings().changed({"input_audio_transcription": values}, "session", lambda _: None, refuse)
    assert (caught.value.param or "").startswith("session.audio.input.transcription")
    with pytest.raises(InvalidRequestError):
        Settings().changed({"input_audio_transcription": {}}, "response", lambda _: None, refuse)

"""Transcripts of what is said in realtime sessions: beside the answers, never before them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from gateway.http.realtime import transcription
from gateway.http.realtime.conversation import LOOK_BYTES
from gateway.http.realtime.settings import Settings, refuse
from tests.gateway.bench import Configure
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import MODEL, HttpBench, http_bench, http_gateway, speak
from tests.gateway.realtime import (
    ANSWER,
    CHUNKS,
    TONE,
    append,
    clear,
    commit,
    detect,
    error_of,
    idle,
    of_type,
    retrieve,
    say,
    take,
    talking,
    update,
)
from tests.gateway.test_http_realtime_early import VOICE, bench_of
from tests.gateway.test_turns import SENTENCES, said

KIND = "conversation.item.input_audio_transcription"
GA = {"audio": {"input": {"transcription": {"model": "whisper-1", "language": "de", "keywords": ["Ulm"]}}}}
BETA = {"input_audio_transcription": {"model": "gpt-4o-mini-transcribe", "prompt": "Ulm"}}


async def transcribed(c: Connection, session: dict[str, Any]) -> None:
    updated = await update(c, **session)
    assert updated.warnings == []
    assert updated.session.audio.input.transcription.model


@pytest.mark.parametrize("session", [GA, BETA], ids=["current", "beta"])
async def test_a_transcript_after_the_answer(web: HttpBench, c: Connection, session: dict[str, Any]) -> None:
    await transcribed(c, session)
    with mock.patch.object(transcription, "PAUSE_S", 1.0):
        item_id = await commit(c, TONE)
        await c.response.create()
        answer = await web.stages.request(0)
    assert answer.speech is not None
    await speak(web, answer, ANSWER, CHUNKS)
    await take(c, "response.done")
    other = await web.stages.request(1)
    assert (other.speech, other.priority) == (None, 1000)
    assert [each.kind for each in other.media] == ["audio"]
    await speak(web, other, " Hello Ulm. ", [])
    delta, done = await take(c, f"{KIND}.completed")
    assert (delta.type, delta.item_id, delta.delta) == (f"{KIND}.delta", item_id, "Hello Ulm.")
    assert (done.item_id, done.content_index, done.transcript) == (item_id, 0, "Hello Ulm.")
    assert (done.usage.type, done.usage.output_tokens > 0) == ("tokens", True)
    assert (await retrieve(c, item_id)).content[0].transcript == "Hello Ulm."


async def test_an_answer_interrupts_a_transcript(web: HttpBench, c: Connection) -> None:
    await transcribed(c, GA)
    await commit(c, TONE)
    interrupted = await web.stages.request(0)
    assert interrupted.speech is None
    await c.response.create()
    await web.stages.aborted(interrupted.request_id)
    answer = await web.stages.request(1)
    assert answer.speech is not None
    await speak(web, answer, ANSWER, CHUNKS)
    assert not of_type(await take(c, "response.done"), f"{KIND}.completed")
    await speak(web, await web.stages.request(2), "Hello", [])
    [delta, done] = await take(c, f"{KIND}.completed")
    assert (delta.delta, done.transcript) == ("Hello", "Hello")


async def test_a_transcript_that_is_being_sent_when_an_answer_begins_is_not_made_again(
    web: HttpBench, c: Connection
) -> None:
    tell = transcription.Transcriber._tell

    async def slowly(self: Any, item_id: str, event: str, **fields: Any) -> None:
        await tell(self, item_id, event, **fields)
        await asyncio.sleep(60.0 if event == "completed" else 0)

    await transcribed(c, GA)
    await commit(c, TONE)
    with mock.patch.object(transcription.Transcriber, "_tell", slowly):
        await speak(web, await web.stages.request(0), "Hello", [])
        await take(c, f"{KIND}.completed")
        await c.response.create()
        await speak(web, await web.stages.request(1), ANSWER, CHUNKS)
        await take(c, "response.done")
    item_id = await commit(c, TONE)
    await speak(web, await web.stages.request(2), "Hello", [])
    assert (await take(c, f"{KIND}.completed"))[-1].item_id == item_id


async def test_transcripts_that_fail(web: HttpBench, c: Connection) -> None:
    await transcribed(c, GA)
    item_id = await commit(c, TONE)
    name = (await web.stages.request(0)).request_id
    # The others wait for this one.
    deleted = await commit(c, TONE)
    await c.conversation.item.delete(item_id=deleted)
    await take(c, "conversation.item.deleted")
    kept = await commit(c, TONE)
    await web.stages.fail(name, "thinker", "media_invalid", "no sound")
    [event] = await take(c, f"{KIND}.failed")
    assert (event.item_id, event.content_index) == (item_id, 0)
    assert (event.error.code, event.error.message) == ("media_invalid", "no sound")
    await speak(web, await web.stages.request(1), "", [])
    failed, done = await take(c, f"{KIND}.completed")
    assert (failed.type, failed.item_id) == (f"{KIND}.failed", deleted)
    assert (done.item_id, done.transcript) == (kept, "")
    # Nor has what an answer could not read a transcript, which would be made up.
    item_id = await commit(c, TONE)
    await c.response.create()
    name = (await web.stages.request(2)).request_id
    await web.stages.fail(name, "thinker", "media_too_large", "it lasts 40 s")
    failed = (await take(c, f"{KIND}.failed"))[-1]
    assert (failed.item_id, failed.error.code) == (item_id, "media_invalid")


async def test_too_many_recordings_that_wait(configure: Configure) -> None:
    with mock.patch.object(transcription, "MAX_WAITING", 2):
        async with http_bench(configure(http_gateway())) as b, talking(b) as c:
            await transcribed(c, GA)
            await commit(c, TONE)
            running = await b.stages.request(0)
            waiting = [await commit(c, TONE), await commit(c, TONE)]
            # One too many: the oldest of those that wait fails.
            await commit(c, TONE)
            [event] = await take(c, f"{KIND}.failed")
            assert (event.item_id, event.error.code) == (waiting[0], "busy")
            await speak(b, running, "Hello", [])
            await take(c, f"{KIND}.completed")


SESSION: Any = {"type": "transcription", "audio": {"input": {**GA["audio"]["input"], "turn_detection": None}}}


@asynccontextmanager
async def transcribing(b: HttpBench, how: str = "intent") -> AsyncIterator[Connection]:
    """A session of transcription, opened in one of the ways in which frameworks open it."""
    ai, query = b.ai, {"intent": "transcription"}
    if how == "secret":
        session = {**SESSION, "audio": {"input": {"noise_reduction": {"type": "near_field"}}}}
        answer = await b.http.post("/v1/realtime/client_secrets", json={"session": session})
        [warning] = answer.json()["warnings"]
        assert warning["param"] == "session.audio.input.noise_reduction"
        ai, query = ai.with_options(api_key=answer.json()["value"]), {}
    model = MODEL if how == "update" else "gpt-4o-mini-transcribe"
    async with ai.realtime.connect(model=model, extra_query={} if how == "update" else query) as c:
        created: Any = (await take(c, "session.created"))[-1]
        assert created.session.type == ("realtime" if how == "update" else "transcription")
        updated = await update(c, **SESSION)
        assert updated.warnings == []
        assert updated.session.to_dict().keys() == {"type", "object", "id", "audio"}
        assert updated.session.audio.input.transcription.model == "whisper-1"
        yield c


@pytest.mark.parametrize("how", ["intent", "update", "secret"])
async def test_a_session_of_transcription(web: HttpBench, how: str) -> None:
    async with transcribing(web, how) as c:
        item_ids = [await commit(c, TONE), await commit(c, TONE)]
        request = await web.stages.request(0)
        assert (request.speech, request.priority) == (None, 0)
        # Each word as soon as it is generated.
        for seq, word in enumerate(["Hello", " Ulm"]):
            await web.stages.text(request.request_id, seq, web.encode(word), "stop" if seq else None)
            [delta] = await take(c, f"{KIND}.delta")
            assert (delta.item_id, delta.delta) == (item_ids[0], word)
        [done] = await take(c, f"{KIND}.completed")
        assert (done.item_id, done.transcript) == (item_ids[0], "Hello Ulm")
        second = await web.stages.request(1)
        # A recording is transcribed alone.
        assert [each.kind for each in second.media] == ["audio"]
        await speak(web, second, "Bye", [])
        await take(c, f"{KIND}.completed")
        assert web.process.gateway.held.total < len(TONE)
        assert (await retrieve(c, item_ids[0])).content[0].transcript == "Hello Ulm"
        for kind, code in (
            ("response.create", "unsupported"),
            ("input_audio_buffer.commit", "input_audio_buffer_commit_empty"),
        ):
            await say(c, type=kind, event_id=kind)
            error = await error_of(c)
            assert (error.code, error.event_id) == (code, kind)
        await clear(c)


async def test_an_interrupted_transcript_repeats_nothing(web: HttpBench) -> None:
    async with transcribing(web, "update") as c:
        await commit(c, TONE)
        await web.stages.text((await web.stages.request(0)).request_id, 0, web.encode("Hello"))
        await take(c, f"{KIND}.delta")
        await update(c, type="realtime")
        await c.response.create()
        again = await web.stages.request(1)
        await speak(web, again if again.speech is None else await web.stages.request(2), "Hello Ulm", [])
        deltas = of_type(await take(c, f"{KIND}.completed"), f"{KIND}.delta")
        assert [each.delta for each in deltas] == [" Ulm"]


async def test_more_recordings_than_a_request_may_have_are_all_transcribed(configure: Configure) -> None:
    config = configure(http_gateway(), {"max_audios": 2})
    async with http_bench(config) as b, transcribing(b) as c:
        item_ids = [await commit(c, TONE) for _ in range(4)]
        for at, item_id in enumerate(item_ids):
            await speak(b, await b.stages.request(at), "Hello", [])
            assert (await take(c, f"{KIND}.completed"))[-1].item_id == item_id


async def test_turns_in_a_session_of_transcription(configure: Configure) -> None:
    async with bench_of(configure) as b, transcribing(b) as c:
        await detect(c, {"type": "server_vad", "silence_duration_ms": 3000})
        # Three windows of the encoder; what is heard while the user speaks comes when two agree.
        for at, (heard, sent) in enumerate(
            [("How arc", ""), ("How are how", "How"), ("How are you too", " are")]
        ):
            await append(c, said(SENTENCES[0]))
            looked = await b.stages.request(at)
            # Answered once all is there: what comes after an answer may be looked at again.
            await c.conversation.item.retrieve(item_id="none")
            before = await take(c, "error")
            await speak(b, looked, heard, [])
            if not at:
                started = next(e for e in before if e.type == "input_audio_buffer.speech_started")
            if sent:
                delta = (await take(c, f"{KIND}.delta"))[-1]
                assert (delta.item_id, delta.delta) == (started.item_id, sent)
            await until(lambda: not b.process.gateway._active, "the end of the look")
        await append(c, bytes(240_000))
        events = await take(c, "conversation.item.done")
        assert [event.type for event in events[:2]] == [
            "input_audio_buffer.speech_stopped",
            "input_audio_buffer.committed",
        ]
        # The look that the end of the turn cut short.
        await b.stages.aborted((await b.stages.request(3)).request_id)
        await speak(b, await b.stages.request(4), "How are you today", [])
        delta, done = await take(c, f"{KIND}.completed")
        assert (delta.item_id, delta.delta) == (started.item_id, " you today")
        assert (done.item_id, done.transcript) == (started.item_id, "How are you today")
        # What is kept of the silence is no recording.
        await c.input_audio_buffer.commit()
        assert (await error_of(c)).code == "input_audio_buffer_commit_empty"
        assert len(b.stages.requests) == 5
    await idle(b)


async def test_a_second_of_speech_is_looked_at_before_a_window_is_complete(configure: Configure) -> None:
    async with bench_of(configure) as b, transcribing(b) as c:
        await detect(c, {"type": "server_vad"})
        await append(c, said(SENTENCES[0])[: 2 * LOOK_BYTES])
        assert [each.kind for each in (await b.stages.request(0)).media] == ["audio"]


async def test_what_the_thinker_computes_while_a_client_that_commits_speaks(configure: Configure) -> None:
    async with bench_of(configure) as b, transcribing(b) as c:
        await append(c, VOICE[:120_000])
        begun = await b.stages.prefill(0)
        assert begun.early == "recording"
        await c.input_audio_buffer.commit()
        request = await b.stages.request(0)
        assert request.prompt_token_ids[: len(begun.prompt_token_ids)] == begun.prompt_token_ids


@pytest.mark.parametrize(
    ("values", "detected"),
    [
        ({"transcription": {"model": "gpt-4o-transcribe"}}, True),
        ({"transcription": {"model": "gpt-realtime-whisper-2"}}, False),
        (
            {"transcription": {"model": "gpt-realtime-whisper"}, "turn_detection": {"type": "semantic_vad"}},
            True,
        ),
    ],
)
def test_models_whose_clients_commit(values: dict[str, Any], detected: bool) -> None:
    session = {"type": "transcription", "audio": {"input": values}}
    settings = Settings().changed(session, "session", lambda _: None, refuse)
    assert (settings.turns is not None) == detected


async def test_a_closed_session_cancels_its_transcript(web: HttpBench) -> None:
    async with talking(web) as c:
        await transcribed(c, GA)
        await commit(c, TONE)
        name = (await web.stages.request(0)).request_id
    await web.stages.aborted(name)
    await idle(web)


async def test_no_transcripts_unless_wanted(web: HttpBench, c: Connection) -> None:
    await transcribed(c, GA)
    updated = await update(c, input_audio_transcription=None)
    assert updated.session.audio.input.transcription is None
    with mock.patch.object(transcription, "PAUSE_S", 0.0):
        await commit(c, TONE)
        await c.response.create()
        await speak(web, await web.stages.request(0), ANSWER, CHUNKS)
        await take(c, "response.done")
    assert len(web.stages.requests) == 1

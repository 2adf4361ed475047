"""Realtime sessions that detect turns: automatic commits and answers, interruptions, silence."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from gateway.http.realtime import turn_detection as listener
from gateway.http.realtime.responses import MOST_IN_A_ROW
from gateway.http.websocket import BoundedWebSocket
from omnirelay.errors import BusyError
from shared.messages import ThinkRequest
from tests.gateway.bench import Configure, Patch
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway, speak, speaking
from tests.gateway.realtime import (
    ANSWER,
    CHUNKS,
    add,
    append,
    ask,
    begin,
    clear,
    commit,
    detect,
    error_of,
    idle,
    of_type,
    recording,
    say,
    settle,
    take,
    talking,
    truncate,
    update,
)
from tests.gateway.test_http_realtime_early import bench_of
from tests.gateway.test_turns import SENTENCES, said

RATE = 24_000
ENDED = [
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
    "conversation.item.added",
    "conversation.item.done",
    "response.created",
]
"""The events of a turn that has ended, and is answered."""
LOUD = 0.1 * np.sign(np.sin(np.arange(RATE * 3, dtype=np.float32) / 9))


@asynccontextmanager
async def listening(b: HttpBench, early: bool = False, **turns: Any) -> AsyncIterator[Connection]:
    """A session with turn detection.

    Args:
        early: Begin answers in pauses; these sessions hear in a moment what nobody says so fast.
    """
    pause = mock.patch("gateway.http.realtime.responses.EARLY_PAUSE_S", 0.0 if early else 3600.0)
    async with talking(b) as c:
        await detect(c, {"type": "server_vad", **turns})
        with pause:
            yield c


async def turns_counted(b: HttpBench, event: str) -> float:
    return await b.metric(f'omnirelay_realtime_turns_total{{event="{event}"}}')


async def test_what_is_said_is_answered_without_a_word_of_the_client(web: HttpBench, answers: None) -> None:
    async with listening(web) as c:
        data = said(SENTENCES[0])
        await append(c, data)
        events = await take(c, "response.done")
        assert [event.type for event in events[:6]] == ["input_audio_buffer.speech_started", *ENDED]
        started, stopped, committed, added = events[:4]
        assert started.item_id == stopped.item_id == committed.item_id == added.item.id
        begin, end = 48 * started.audio_start_ms, 48 * stopped.audio_end_ms
        assert recording(web.stages.requests[0].media[-1]) == data[begin:end]
        assert events[-1].response.status == "completed"
        # The next turn continues the conversation; times go on.
        await append(c, said(SENTENCES[1]))
        again = await take(c, "response.done")
        assert again[0].audio_start_ms > stopped.audio_end_ms
        assert [item.kind for item in web.stages.requests[1].media] == ["audio", "audio"]
        assert await turns_counted(web, "stopped") == 2
        assert 0 < await web.metric("omnirelay_turn_detection_seconds_total") < 5
    await idle(web)


@pytest.mark.parametrize("interrupts", [True, False])
async def test_speech_during_an_answer(web: HttpBench, interrupts: bool) -> None:
    async with listening(web, interrupt_response=interrupts) as c:
        request = await begin(web, c)
        await web.stages.text(request.request_id, 0, web.encode("One two"))
        await web.stages.audio(request.request_id, 0, LOUD.tobytes())
        answer = (await take(c, "response.output_audio.delta"))[-1]
        await append(c, said(SENTENCES[0]))
        events = await take(c, "conversation.item.done" if not interrupts else "response.created")
        kinds = [event.type for event in events]
        begun = kinds.index("input_audio_buffer.speech_started")
        if interrupts:
            [done] = of_type(events, "response.done")
            assert kinds.index("response.done") > begun
            assert done.response.status_details.reason == "turn_detected"
            await web.stages.aborted(request.request_id)
            # The client says what was heard; the next answer knows it.
            await truncate(c, answer.item_id, 1500)
            assert await turns_counted(web, "interrupted") == 1
        else:
            assert "response.done" not in kinds
            assert "input_audio_buffer.committed" in kinds
            assert len(web.stages.requests) == 1


async def test_false_alarms_interrupt_nothing(web: HttpBench) -> None:
    async with listening(web) as c:
        request = await begin(web, c)
        voice = np.frombuffer(said(SENTENCES[0], 3.0), "<i2")
        await web.stages.audio(request.request_id, 0, (voice / np.float32(32768)).tobytes())
        await take(c, "response.output_audio.delta")
        # An echo of the answer, then a cough.
        echo = (voice * 0.2).astype("<i2").tobytes()
        noise = np.random.default_rng(0).normal(size=RATE * 15 // 100) * 3000
        await append(c, echo + noise.astype("<i2").tobytes() + bytes(RATE))
        await settle(c)
        assert web.process.gateway._active
        await c.response.cancel()
        assert not of_type(await take(c, "response.done"), "input_audio_buffer.speech_started")
    await idle(web)


async def test_without_create_response_the_client_answers(web: HttpBench, answers: None) -> None:
    async with listening(web, create_response=False) as c:
        await append(c, said(SENTENCES[0]))
        await take(c, "conversation.item.done")
        await settle(c)
        assert web.stages.requests == []
        await ask(c)


async def test_settings_in_both_shapes_and_back_to_manual(web: HttpBench, c: Connection) -> None:
    updated = await detect(c, {"type": "server_vad", "silence_duration_ms": 200})
    shown = updated.session.audio.input.turn_detection
    assert (shown.type, shown.threshold, shown.prefix_padding_ms) == ("server_vad", 0.5, 300)
    assert (shown.silence_duration_ms, shown.interrupt_response) == (200, True)
    updated = await update(c, turn_detection={"type": "semantic_vad"})
    assert updated.session.audio.input.turn_detection.eagerness == "auto"
    # What says nothing of it changes nothing; what is wrong neither.
    await settle(c)
    await say(c, type="session.update", session={"turn_detection": {"type": "x"}})
    assert (await error_of(c)).param == "session.audio.input.turn_detection.type"
    assert (await update(c, type="realtime")).session.audio.input.turn_detection.type == "semantic_vad"
    await append(c, said(SENTENCES[0])[: 2 * RATE * 2])
    assert (await take(c, "input_audio_buffer.speech_started"))[-1].audio_start_ms > 0
    assert (await detect(c, None)).session.audio.input.turn_detection is None
    await append(c, bytes(4 * RATE))
    await c.input_audio_buffer.commit()
    assert not of_type(await take(c, "conversation.item.done"), "input_audio_buffer.speech_stopped")


async def test_clearing_and_committing_during_a_turn(web: HttpBench) -> None:
    async with listening(web) as c:
        spoken = said(SENTENCES[0])[: 2 * RATE * 2]
        await append(c, spoken)
        first = (await take(c, "input_audio_buffer.speech_started"))[-1]
        await clear(c)
        await append(c, spoken)
        second = (await take(c, "input_audio_buffer.speech_started"))[-1]
        assert second.item_id != first.item_id
        assert second.audio_start_ms >= 2000
        assert await commit(c) == second.item_id
        # What finds no memory as an item is not in the buffer any more, either.
        await append(c, spoken)
        await take(c, "input_audio_buffer.speech_started")
        await settle(c)
        quota = web.process.gateway.held.quota
        quota.take("others", size := quota.free)
        await c.input_audio_buffer.commit()
        assert (await error_of(c)).code == "busy"
        quota.give("others", size)
        await append(c, said(SENTENCES[0]))
        await take(c, "input_audio_buffer.speech_stopped")


async def test_the_thinker_computes_while_a_turn_goes_on(configure: Configure) -> None:
    async with bench_of(configure) as b, speaking(b, ANSWER, CHUNKS), listening(b) as c:
        await append(c, bytes(2 * RATE * 6))
        await settle(c)
        assert b.stages.prefills == []
        long = said(SENTENCES[0], 0)[2 * RATE :] * 4
        await append(c, long)
        started = (await take(c, "input_audio_buffer.speech_started"))[-1]
        begun = await b.stages.prefill(0)
        await b.stages.prefilled(begun.request_id, 90)
        await append(c, bytes(2 * RATE))
        await take(c, "response.done")
        audio = bytes(begun.media[-1].data.view)[44:]
        assert (bytes(2 * RATE * 6) + long)[48 * started.audio_start_ms :].startswith(audio)
        assert recording(b.stages.requests[0].media[-1]).startswith(audio)


async def test_silence_after_an_answer_is_answered_a_few_times(web: HttpBench) -> None:
    quick = mock.patch("gateway.http.realtime.session.IDLE_UNIT_S", 0.00001)
    async with listening(web, idle_timeout_ms=5000) as c:
        with quick:
            await add(c)
            await c.response.create()
            for at in range(MOST_IN_A_ROW + 1):
                request = await web.stages.request(at)
                await append(c, bytes(2 * RATE))
                await settle(c)
                await speak(web, request, ANSWER, CHUNKS[:1])
                await take(c, "response.done")
                if at == MOST_IN_A_ROW:
                    break
                timeout, committed, added = (await take(c, "conversation.item.added"))[:3]
                assert timeout.type == "input_audio_buffer.timeout_triggered"
                assert timeout.item_id == committed.item_id == added.item.id
                assert timeout.audio_start_ms < timeout.audio_end_ms
            await settle(c)
            await until(lambda: not web.process.gateway._active, "the end of all answers")
            assert len(web.stages.requests) == MOST_IN_A_ROW + 1
    await idle(web)


async def silent_as_long_as(other: Connection, c: Connection) -> None:
    """Silence is answered in another session, and nothing happens in this one."""
    await append(other, bytes(RATE))
    await add(other)
    await ask(other)
    await take(other, "input_audio_buffer.timeout_triggered")
    await say(c, type="session.update", session={})
    assert [event.type for event in await take(c, "session.updated")] == ["session.updated"]


async def test_silence_is_not_answered_where_that_is_not_wanted_any_more(
    web: HttpBench, answers: None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("gateway.http.realtime.session.IDLE_UNIT_S", 0.0001)
    async with listening(web, idle_timeout_ms=5000) as c, listening(web, idle_timeout_ms=5000) as other:
        await append(c, bytes(RATE))
        await add(c)
        await ask(c)
        await detect(c, {"type": "server_vad"})
        await silent_as_long_as(other, c)


async def test_silence_is_not_answered_where_an_answer_ended_while_the_user_spoke(
    web: HttpBench, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("gateway.http.realtime.session.IDLE_UNIT_S", 0.0001)
    turns: Any = {"idle_timeout_ms": 5000, "interrupt_response": False}
    async with listening(web, **turns, create_response=False) as c, listening(web, **turns) as other:
        request = await begin(web, c)
        await append(c, spoken(0))
        await take(c, "input_audio_buffer.speech_started")
        await speak(web, request, ANSWER, CHUNKS[:1])
        await take(c, "response.done")
        await append(c, bytes(2 * RATE))
        await take(c, "conversation.item.done")
        async with speaking(web, ANSWER, CHUNKS[:1]):
            await silent_as_long_as(other, c)


async def test_a_flood_of_audio_waits_in_its_own_connection(web: HttpBench) -> None:
    """A session that sends more than it may listen to gets no more of the thread; others go on."""
    with mock.patch.object(listener, "BURST_S", 2.0), mock.patch.object(listener, "SPEED", 0.01):
        async with listening(web) as flood, listening(web) as c:
            await append(flood, bytes(2 * RATE * 6))
            await append(c, said(SENTENCES[3], 0.3)[RATE:])
            await take(c, "input_audio_buffer.speech_started")


async def test_a_full_buffer_forgets_a_whole_turn(configure: Configure) -> None:
    async with bench_of(configure, media={"max_audio_seconds": 5}) as b, listening(b) as c:
        await append(c, spoken(400))
        await append(c, bytes(RATE * 49 // 5), RATE * 49 // 5)
        assert (await error_of(c)).code == "input_audio_buffer_commit_empty"
        await settle(c)


async def test_a_client_that_is_heard_is_not_taken_for_gone(web: HttpBench, monkeypatch: Patch) -> None:
    """Its answers to pings are not read before the event is processed."""
    monkeypatch.setattr(listener, "BURST_S", 0.5)
    monkeypatch.setattr(listener, "SPEED", 1.0)
    make = BoundedWebSocket.__init__

    def impatient(self: BoundedWebSocket, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.ping_interval, self.ping_timeout = 0.3, 1.0

    monkeypatch.setattr(BoundedWebSocket, "__init__", impatient)

    async with listening(web) as c:
        await append(c, bytes(2 * RATE * 3))
        await clear(c)


def spoken(silence_ms: int) -> bytes:
    """A sentence, with so much silence behind it as a turn hears."""
    data = said(SENTENCES[0])
    speech_ends = max(np.flatnonzero(np.abs(np.frombuffer(data, "<i2")) > 400)) * 2
    return data[:speech_ends] + bytes(RATE * silence_ms // 1000 * 2)


async def early_request(b: HttpBench, index: int) -> ThinkRequest:
    """A request that nobody has heard of."""
    request = await b.stages.request(index)
    await b.stages.text(request.request_id, 0, b.encode("One two"))
    return request


async def test_the_answer_is_begun_in_a_pause_and_sent_when_it_was_the_end(web: HttpBench) -> None:
    async with listening(web, early=True) as c:
        data = spoken(350)
        await append(c, data)
        started = (await take(c, "input_audio_buffer.speech_started"))[-1]
        request = await web.stages.request(0)
        await settle(c)
        await append(c, bytes(RATE))
        stopped, committed, _, _, created = await take(c, "response.created")
        assert stopped.type == "input_audio_buffer.speech_stopped"
        assert committed.item_id == started.item_id
        await speak(web, request, ANSWER, CHUNKS)
        response = (await take(c, "response.done"))[-1].response
        assert (response.id, response.status) == (created.response.id, "completed")
        assert len(web.stages.requests) == 1
        whole = (data + bytes(RATE))[48 * started.audio_start_ms : 48 * stopped.audio_end_ms]
        assert recording(request.media[-1]) == whole
        assert await turns_counted(web, "answered_early") == 1
        assert await turns_counted(web, "dropped_early") == 0
        # The next answer knows of one question and one answer.
        await c.response.create()
        again = await web.stages.request(1)
        assert len(again.media) == 1
        await speak(web, again, ANSWER, CHUNKS)
        await take(c, "response.done")
    await idle(web)


async def test_nobody_hears_of_an_answer_that_was_begun_before_the_user_went_on(web: HttpBench) -> None:
    async with listening(web, early=True) as c:
        await append(c, spoken(350))
        dropped = await early_request(web, 0)
        await append(c, spoken(0)[2 * RATE :])
        await web.stages.aborted(dropped.request_id)
        await settle(c)
        await append(c, bytes(2 * RATE))
        assert [event.type for event in await take(c, "response.created")] == ENDED

        def sound() -> bytes:
            return recording(web.stages.requests[-1].media[-1])

        longer = len(recording(dropped.media[-1])) + RATE
        await until(lambda: len(sound()) > longer, "the request for all of it")
        last = web.stages.requests[-1]
        assert len(last.media) == 1
        assert await turns_counted(web, "dropped_early") >= 1
        await speak(web, last, ANSWER, CHUNKS)
        await take(c, "response.done")
    await idle(web)


@pytest.mark.parametrize("what", ["clear", "commit", "only commit", "no turns", "settings", "close"])
async def test_what_ends_or_changes_a_turn_drops_an_answer_begun_early(web: HttpBench, what: str) -> None:
    async with listening(web, early=True) as c:
        await append(c, spoken(350))
        request = await early_request(web, 0)
        if what == "clear":
            await clear(c)
        elif what in ("commit", "only commit"):
            await commit(c)
            if what == "commit":
                await c.response.create()
                await speak(web, await web.stages.request(1), ANSWER, CHUNKS)
                await take(c, "response.done")
        elif what == "no turns":
            await detect(c, None)
        elif what == "settings":
            await update(c, instructions="Be brief.")
            await append(c, bytes(RATE))
            await speak(web, await web.stages.request(1), ANSWER, CHUNKS)
            assert len(of_type(await take(c, "response.done"), "response.created")) == 1
        if what != "close":
            await web.stages.aborted(request.request_id)
    await web.stages.aborted(request.request_id)
    await idle(web)


async def test_an_answer_that_could_not_be_begun_early_is_begun_at_the_end(web: HttpBench) -> None:
    async with listening(web, early=True) as c:
        with mock.patch.object(web.process.gateway, "submit", side_effect=BusyError("full", 10)) as submit:
            await append(c, spoken(350))
            await until(lambda: submit.call_count, "the refused request")
            await settle(c)
        await append(c, bytes(RATE))
        await speak(web, await web.stages.request(0), ANSWER, CHUNKS)
        assert (await take(c, "response.done"))[-1].response.status == "completed"
    await idle(web)


async def test_nothing_is_begun_early_where_it_delays_others_or_is_not_wanted(configure: Configure) -> None:
    config = configure(http_gateway(), max_active=1)
    async with (
        http_bench(config) as b,
        listening(b, early=True) as full,
        listening(b, early=True, create_response=False) as silent,
    ):
        for c in (full, silent):
            await append(c, spoken(350))
            await settle(c)
        assert b.stages.requests == []

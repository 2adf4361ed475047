"""Calls by WebRTC with a real peer: speech both ways, interruptions, endings."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import numpy as np
import pytest
from aiortc.rtp import HeaderExtensionsMap, RtpPacket

from gateway.requests.metrics import CallEnd
from shared.messages import SAMPLE_RATE
from tests.gateway.bench import Configure, Patch
from tests.gateway.caller import Caller, calling
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway, likeness, melody, speaking
from tests.gateway.realtime import ANSWER, HELLO, PUSH_TO_TALK, SAID, idle
from tests.gateway.test_http_realtime_turns import ENDED
from tests.gateway.test_turns import SENTENCES, said

LONG = (0.2 * melody(20.0)).astype(np.float32)


"""Quiet enough to be interrupted."""
GATEWAY = CALLS = {"webrtc": {"enabled": True, "addresses": ["127.0.0.1"]}}


def with_calls(**webrtc: Any) -> dict[str, Any]:
    return http_gateway(webrtc=CALLS["webrtc"] | webrtc)


async def free(b: HttpBench, *ends: CallEnd) -> None:
    """Nothing is held for any call any more; with ``ends``, calls are counted as having ended so."""
    context = b.process._context
    assert context is not None
    await until(lambda: not context.calls, "the end of the calls")
    await idle(b)
    if ends:
        assert await b.metric('omnirelay_realtime_sessions{connection="webrtc"}') == 0
        for end in get_args(CallEnd):
            assert await b.metric(f'omnirelay_realtime_calls_total{{end="{end}"}}') == ends.count(end)


@asynccontextmanager
async def connected(b: HttpBench, session: Any = PUSH_TO_TALK) -> AsyncIterator[Caller]:
    """A call, without turn detection unless wanted: only events make answers."""
    async with calling(b.http) as c:
        await c.call(session)
        yield c


@pytest.fixture(name="call")
async def _call(web: HttpBench) -> AsyncIterator[Caller]:
    async with connected(web) as call:
        yield call


async def ask(c: Caller, last: str = "response.done") -> list[dict[str, Any]]:
    c.send("conversation.item.create", item=HELLO)
    c.send("response.create")
    return await c.take(last)


def vanish(c: Caller) -> None:
    """As if the client's machine was switched off: its sockets neither send nor receive any more.

    They stay open: aiortc never closes a connection whose reports it cannot send.
    """

    def lose(*_: object) -> None:
        pass

    for transceiver in c.connection.getTransceivers():
        for protocol in transceiver.receiver.transport.transport._connection._protocols:
            protocol.transport.sendto = lose  # type: ignore[method-assign, assignment]
            protocol.datagram_received = lose  # type: ignore[method-assign, assignment]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


async def test_a_spoken_question_gets_a_spoken_answer(web: HttpBench, answers: None) -> None:
    async with calling(web.http) as c:
        session = await c.call()
        assert session["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        c.microphone.say(said(SENTENCES[0]))
        events = await c.take("output_audio_buffer.stopped")
        assert kinds(events)[:3] == ["input_audio_buffer.speech_started", *ENDED[:2]]
        done = next(each for each in events if each["type"] == "response.done")
        assert done["response"]["status"] == "completed"
        assert "response.output_audio.delta" not in kinds(events)
        started = kinds(events).index("output_audio_buffer.started")
        assert kinds(events).index("response.created") < started
        assert events[started]["response_id"] == done["response"]["id"]
        assert len({each["event_id"] for each in events}) == len(events)
        await until(lambda: likeness(c.sound(), SAID)[1] > 0.9, "the whole answer")
    await free(web)


async def test_the_users_voice_interrupts_and_only_what_was_heard_is_kept(web: HttpBench) -> None:
    async with speaking(web, ANSWER, [LONG]):
        async with connected(web, {"type": "realtime"}) as c:
            done = (await ask(c))[-1]["response"]
            await until(lambda: len(c.loud) > 25, "half a second of the answer")
            c.microphone.say(said(SENTENCES[0]))
            events = await c.take("conversation.item.truncated")
            order = [each for each in kinds(events) if each.startswith(("input", "output", "conv"))]
            assert order[-3:] == [
                "input_audio_buffer.speech_started",
                "output_audio_buffer.cleared",
                "conversation.item.truncated",
            ]
            assert events[-2]["response_id"] == done["id"]
            assert events[-1]["item_id"] == done["output"][0]["id"]
            # The next answer is not begun before the user has finished.
            await c.take("input_audio_buffer.speech_stopped")
            # What was sent is what came: counted in frames, as those of a busy machine come late.
            frames = c.loud[-1] + 1 - c.loud[0]
            assert events[-1]["audio_end_ms"] == pytest.approx(20 * frames, abs=100)
        await free(web)


async def test_text_of_which_nothing_was_heard_is_not_kept(web: HttpBench, call: Caller) -> None:
    asking = asyncio.create_task(ask(call, "response.output_audio_transcript.delta"))
    await web.stages.text((await web.stages.request(0)).request_id, 0, web.encode(ANSWER))
    item = (await asking)[-1]["item_id"]
    call.send("output_audio_buffer.clear")
    cut = (await call.take("conversation.item.truncated"))[-1]
    assert (cut["item_id"], cut["audio_end_ms"]) == (item, 0)


async def test_a_client_clears_what_is_being_played(web: HttpBench) -> None:
    async with speaking(web, ANSWER, [LONG]):
        async with connected(web) as c:
            await ask(c, "output_audio_buffer.started")
            c.send("output_audio_buffer.clear")
            await c.take("output_audio_buffer.cleared")
            item = (await c.take("conversation.item.truncated"))[-1]["item_id"]
            c.send("conversation.item.retrieve", item_id=item)
            kept = (await c.take("conversation.item.retrieved"))[-1]["item"]
            assert kept["content"][0]["transcript"] != ANSWER
            # With nothing to clear nothing happens, and the call goes on.
            c.send("output_audio_buffer.clear")
            again = await ask(c, "output_audio_buffer.started")
            assert "output_audio_buffer.cleared" not in kinds(again)
            # What the client has cut to less stays so.
            cut = next(each for each in again if each["type"] == "response.output_item.added")["item"]["id"]
            c.send("conversation.item.truncate", item_id=cut, content_index=0, audio_end_ms=0)
            await c.take("conversation.item.truncated")
            c.send("output_audio_buffer.clear")
            await c.take("output_audio_buffer.cleared")
            c.send("conversation.item.retrieve", item_id=cut)
            assert kinds(await c.take("conversation.item.retrieved")) == ["conversation.item.retrieved"]
        await free(web)


async def test_answers_are_played_one_after_the_other(web: HttpBench, answers: None) -> None:
    async with connected(web) as c:
        first = (await ask(c))[-1]["response"]["id"]
        await ask(c)
        played = await c.take("output_audio_buffer.stopped")
        played += await c.take("output_audio_buffer.stopped")
        ids = [each["response_id"] for each in played if each["type"].endswith(".stopped")]
        assert ids[0] == first
        assert ids[1] != first
    await free(web)


async def test_events_that_cannot_be_processed(web: HttpBench, call: Caller) -> None:
    call.channel.send(b"binary")
    call.channel.send("no json")
    call.send("response.sing", event_id="mine")
    errors = [(await call.take("error"))[-1]["error"] for _ in range(3)]
    assert [each["event_id"] for each in errors] == [None, None, "mine"]


@pytest.mark.parametrize("how", ["hangs up", "closes"])
async def test_a_call_ends_when_its_client_says_so(web: HttpBench, call: Caller, how: str) -> None:
    call.send("conversation.item.create", item=HELLO)
    call.send("response.create")
    request = await web.stages.request(0)
    if how == "closes":
        await call.close()
    else:
        assert (await call.hang_up()).status_code == 200
    # The request is aborted at the stages, too.
    await web.stages.aborted(request.request_id)
    if how == "hangs up":
        await call.end()
        await free(web, "hung_up")
        assert (await call.hang_up()).status_code == 404
    else:
        await free(web)


async def test_a_call_ends_when_its_peer_vanishes(web: HttpBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("aioice.ice.CONSENT_INTERVAL", 0.1)

    async with connected(web) as c:
        assert await web.metric('omnirelay_realtime_sessions{connection="webrtc"}') == 1
        vanish(c)
        await free(web, "hung_up")


def reporting() -> list[str]:
    """The tasks that report what was received."""
    coroutines = (each.get_coro() for each in asyncio.all_tasks())
    return [name for each in coroutines if (name := getattr(each, "__qualname__", "")).endswith("._run_rtcp")]


async def test_timestamps_that_no_report_can_hold_leave_nothing_open(
    web: HttpBench, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("gateway.http.realtime.webrtc.call.FAST_S", 1000.0)
    monkeypatch.setattr("gateway.http.realtime.webrtc.peer.CLOSE_S", 0.5)

    async with connected(web) as c:
        voice = c.connection.getTransceivers()[0]
        everybody = len(reporting())
        for number in itertools.count():
            if len(reporting()) < everybody:
                break
            # Each is 2^32 after or before the last one, and a little late: more than 32 bits on average.
            packet = RtpPacket(
                payload_type=voice._codecs[0].payloadType or 0,
                sequence_number=number % 2**16,
                timestamp=number % 2 * (2**32 - 1),
                ssrc=77,
            )
            await voice.sender.transport._send_rtp(packet.serialize(HeaderExtensionsMap()))
            await asyncio.sleep(0.02 if number > 500 and number % 2 else 0)
        await c.hang_up()
        await free(web, "hung_up")
    assert not reporting()


@pytest.mark.parametrize(
    ("limit", "value", "end"),
    [
        ("gateway.http.realtime.webrtc.call.CONNECT_S", 0.2, "unconnected"),
        ("gateway.http.realtime.webrtc.call.IDLE_S", 0.5, "time_limit"),
        ("gateway.http.realtime.webrtc.call.FAST_S", -1.0, "too_fast"),
        ("max_call_s", 0.5, "time_limit"),
    ],
)
async def test_calls_are_bounded_in_time(
    configure: Configure, monkeypatch: Patch, limit: str, value: float, end: CallEnd
) -> None:
    own = {limit: value} if limit == "max_call_s" else {}
    if not own:
        monkeypatch.setattr(limit, value)

    async with http_bench(configure(with_calls(**own))) as b, calling(b.http) as c:
        if limit.endswith("CONNECT_S"):
            # It has its answer, and never comes.
            headers = {"Content-Type": "application/sdp"}
            offered = await b.http.post("/v1/realtime/calls", content=await c.offer(), headers=headers)
            assert offered.status_code == 201
        else:
            await c.call(PUSH_TO_TALK)
            await c.end()
        await free(b, end)


async def test_a_call_in_which_the_client_only_speaks_is_not_idle(web: HttpBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.http.realtime.webrtc.call.IDLE_S", 1.5)
    turns = {"type": "server_vad", "create_response": False}
    async with connected(web, {"audio": {"input": {"turn_detection": turns}}}) as c:
        c.microphone.say(said(SENTENCES[0])[SAMPLE_RATE:])
        await c.take("conversation.item.done")
        await c.end()
        await free(web, "time_limit")


async def test_a_gateway_that_stops_ends_calls(web: HttpBench, call: Caller) -> None:
    await web.process.stop()
    await call.end()


async def test_input_that_finds_no_memory_is_refused_once(web: HttpBench, call: Caller) -> None:
    quota = web.process.gateway.held.quota
    quota.take("others", quota.total)
    error = (await call.take("error"))[-1]["error"]
    assert error["code"] == "busy"
    call.send("input_audio_buffer.clear")
    events = await call.take("input_audio_buffer.cleared")
    assert kinds(events) == ["input_audio_buffer.cleared"]
    quota.give("others", quota.total)


def have_much_told(c: Caller, times: int) -> None:
    """Say something long, and ask for it again and again."""
    content = [{"type": "input_text", "text": "x" * 50_000}]
    item = {"type": "message", "id": "large", "role": "user", "content": content}
    c.send("conversation.item.create", item=item)
    for _ in range(times):
        c.send("conversation.item.retrieve", item_id="large")


async def test_a_client_that_reads_no_events(web: HttpBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.http.realtime.webrtc.call.MAX_UNREAD", 0)

    async with connected(web) as c:
        have_much_told(c, 20)
        await c.take("conversation.item.retrieved")
        monkeypatch.setattr("gateway.http.realtime.webrtc.call.STALL_S", 0.5)
        for _ in range(3):
            # Also the one that was sent with more time.
            await c.take("conversation.item.retrieved")
        vanish(c)
        # Before the peer counts as gone.
        await free(web, "too_slow")

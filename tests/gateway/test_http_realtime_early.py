"""What the gateway has the thinker compute while a user of a realtime session speaks or types."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.resources.realtime.realtime import AsyncRealtimeConnection as Connection

from gateway.access.account import ClientAccount, Principal, Unread
from gateway.http.realtime import conversation as early
from gateway.http.realtime.conversation import AHEAD_BYTES, EarlyPrompt
from omnirelay.protocol import GenerateRequest
from shared.families import QWEN2_5_OMNI
from shared.messages import StageLoad
from tests.gateway.bench import Configure
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway, speaking
from tests.gateway.realtime import (
    ANSWER,
    CHUNKS,
    add,
    append,
    ask,
    begin,
    clear,
    idle,
    picture,
    recording,
    settle,
    take,
    talking,
    update,
)

VOICE = (8000 * np.sin(np.arange(24_000 * 12) / 30)).astype("<i2").tobytes()
SECOND = 48_000


@asynccontextmanager
async def bench_of(configure: Configure, prefills: int = 4, **gateway: Any) -> AsyncIterator[HttpBench]:
    """A gateway whose thinker computes so many beginnings at a time."""
    async with http_bench(configure(http_gateway(), **gateway)) as b:
        b.stages.max_prefills = prefills
        await until(lambda: known(b).prefills == prefills, "the thinker's limits")
        served = b.process.gateway
        with mock.patch.object(served, "compute_early", wraps=served.compute_early):
            yield b
        await idle(b)
        assert b.process.gateway.prefills._open == {}


def begun_by(b: HttpBench) -> int:
    """How many beginnings the sessions have wanted; what they do, they do before the next event is read."""
    wanted: Any = b.process.gateway.compute_early
    return int(wanted.call_count)


async def ended(b: HttpBench) -> None:
    await until(lambda: not b.process.gateway.prefills._open, "the end of the beginning")


def known(b: HttpBench) -> Any:
    (thinker,) = b.process.gateway.registry.ready("thinker")
    return thinker.beat.limits


async def recite(c: Connection, start_s: float, stop_s: float) -> None:
    """Append the sound between two times, half a second at a time, and wait until all was read."""
    await append(c, VOICE[int(start_s * SECOND) : int(stop_s * SECOND)], piece=SECOND // 2)
    await settle(c)


async def counted(b: HttpBench, outcome: str) -> float:
    return await b.metric(f'omnirelay_early_prefills_total{{outcome="{outcome}"}}')


async def test_the_thinker_computes_while_the_user_speaks(configure: Configure) -> None:
    async with bench_of(configure) as b, speaking(b, ANSWER, CHUNKS), talking(b) as c:
        await update(c, instructions="Be brief.")
        await recite(c, 0, 2)
        assert begun_by(b) == 0
        await recite(c, 2, 3)
        first = await b.stages.prefill(0)
        # While it is computed no other is sent.
        await recite(c, 3, 5)
        assert begun_by(b) == 1
        await b.stages.prefilled(first.request_id, 90)
        await ended(b)
        await recite(c, 5, 6.5)
        second = await b.stages.prefill(1)
        for begun, seconds in ((first, 2.5), (second, 5.5)):
            assert begun.early == "recording"
            assert [item.kind for item in begun.media] == ["audio"]
            assert recording(begun.media[-1]) == VOICE[: int(seconds * SECOND)]
            assert begun.route
            assert begun.route.thinker == "first"
        await c.input_audio_buffer.commit()
        await take(c, "conversation.item.done")
        # The user had finished before it was computed.
        await until(lambda: second.request_id in b.stages.aborts["thinker"], "its abort")
        await ask(c)
        (request,) = b.stages.requests
        assert first.prompt_token_ids == second.prompt_token_ids
        assert request.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
        assert first.prompt_token_ids[-1] in b.process._prompts.placeholders
        assert bytes(request.media[0].data.view)[44:] == VOICE[: int(6.5 * SECOND)]
        assert (await counted(b, "computed"), await counted(b, "aborted")) == (1, 1)


async def test_images_and_text_that_come_before_a_response_are_computed(configure: Configure) -> None:
    async with bench_of(configure) as b, speaking(b, ANSWER, CHUNKS), talking(b) as c:
        await c.conversation.item.create(item={"type": "message", "role": "user", "content": [picture()]})
        begun = await b.stages.prefill(0)
        assert begun.early == "prompt"
        assert [each.kind for each in begun.media] == ["image"]
        await b.stages.prefilled(begun.request_id, 90)
        await ended(b)
        # A response that follows at once computes its prompt itself.
        with mock.patch.object(early, "PAUSE_S", 60.0):
            await add(c)
            await add(c)
            await ask(c)
        await settle(c)
        assert begun_by(b) == 1


@pytest.mark.parametrize("how", ["clear", "leave", "respond"])
async def test_it_ends_with_what_it_was_for(configure: Configure, how: str) -> None:
    async with bench_of(configure) as b:
        async with talking(b) as c:
            await recite(c, 0, 2.5)
            begun = await b.stages.prefill(0)
            assert b.process.gateway.held.total > 2 * len(recording(begun.media[-1])) - 1000
            if how == "clear":
                await c.input_audio_buffer.clear()
            if how == "respond":
                await begin(b, c)
            if how != "leave":
                await b.stages.aborted_at(begun.request_id, "thinker")
                # A late word of it is nobody's.
                await b.stages.prefilled(begun.request_id, 90)
                await settle(c) if how == "clear" else None
        await b.stages.aborted_at(begun.request_id, "thinker")
        assert b.stages.aborts["talker"] == ([] if how != "respond" else b.stages.aborts["talker"])


@pytest.mark.parametrize("why", ["no prefix cache", "requests wait", "switched off"])
async def test_nothing_is_sent_where_there_is_no_room(configure: Configure, why: str) -> None:
    limits = {"early_prompt_tokens": 0} if why == "switched off" else {}
    async with bench_of(configure, 0 if why == "no prefix cache" else 4, **limits) as b:
        if why == "requests wait":
            b.stages.replica("thinker").load = StageLoad(waiting=1)
            registry = b.process.gateway.registry
            await until(lambda: registry.ready("thinker")[0].beat.load.waiting, "its load")
        async with talking(b) as c:
            await recite(c, 0, 7)
            assert begun_by(b) == 0


async def test_what_a_client_has_computed_between_two_requests_is_bounded(configure: Configure) -> None:
    async with bench_of(configure, early_prompt_tokens=1000) as b, talking(b) as c:
        for index in range(3):
            await recite(c, 0, 2.5)
            begun = await b.stages.prefill(index)
            # Found in the prefix cache, it costs nothing.
            await b.stages.prefilled(begun.request_id, 900, cached=880 if index < 2 else 0)
            await ended(b)
            await clear(c)
        await recite(c, 0, 2.5)
        # 900 + 40: still less than the bound.
        await b.stages.prefilled((await b.stages.prefill(3)).request_id, 900)
        await ended(b)
        await c.input_audio_buffer.clear()
        async with talking(b) as other:
            await recite(other, 0, 7)
        await recite(c, 0, 7)
        assert begun_by(b) == 4
        async with speaking(b, ANSWER, CHUNKS):
            await add(c)
            await ask(c)
        await recite(c, 7, 9)
        begun = await b.stages.prefill(4)
        # Nor is it more for a client that makes a request meanwhile.
        async with talking(b) as other, speaking(b, ANSWER, CHUNKS):
            await add(other)
            await ask(other)
        await b.stages.prefilled(begun.request_id, 90, cached=90)
        await ended(b)
        assert b.process.gateway.prefills._spent == {"address 127.0.0.1": 0}


async def test_a_beginning_that_failed_is_not_repeated_in_its_session(configure: Configure) -> None:
    async with bench_of(configure) as b, talking(b) as c:
        await recite(c, 0, 2.5)
        begun = await b.stages.prefill(0)
        await b.stages.fail(begun.request_id, "thinker", "engine_failed", "it broke")
        await ended(b)
        await recite(c, 2.5, 9)
        assert begun_by(b) == 1
        assert await counted(b, "failed") == 1
        async with talking(b) as other:
            await recite(other, 0, 2.5)
            second = await b.stages.prefill(1)
            await b.stages.fail(second.request_id, "thinker", "busy", "too many")
            await ended(b)
            await recite(other, 2.5, 5)
            await b.stages.prefill(2)


async def test_a_lost_thinker_ends_it(configure: Configure) -> None:
    async with bench_of(configure) as b, talking(b) as c:
        await recite(c, 0, 2.5)
        await b.stages.prefill(0)
        await b.stages.replica("thinker").leave()
        await ended(b)
        b.stages.add("thinker", "second", b.config.stages.thinker.inbox)
        await until(lambda: b.process.status().ready, "another thinker")


async def test_one_client_gets_half_of_the_places(configure: Configure) -> None:
    async with bench_of(configure, prefills=4) as b, talking(b) as c, talking(b) as d, talking(b) as e:
        for one in (c, d, e):
            await recite(one, 0, 2.5)
            if one is not e:
                await b.stages.prefill(begun_by(b) - 1)
        assert begun_by(b) == 2


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 3 * SECOND), min_size=1, max_size=120),
    window_s=st.sampled_from([2.0, 8.0]),
)
def test_what_is_sent_of_a_recording_is_a_few_times_its_length(pieces: list[int], window_s: float) -> None:
    window = round(window_s * SECOND)
    sent: list[int] = []
    size = 0
    # It computes at once.
    thinker: Any = SimpleNamespace(
        prompts=SimpleNamespace(family=replace(QWEN2_5_OMNI, audio_window_s=window_s)),
        prefills=SimpleNamespace(thinker_for=lambda *_: "a"),
        compute_early=mock.AsyncMock(return_value="computed"),
    )

    async def scenario() -> None:
        nonlocal size
        prompt = EarlyPrompt(thinker, ClientAccount("a", 1, 1, Principal("a"), Unread(1)), "a")

        async def begun() -> GenerateRequest:
            sent.append(size)
            return GenerateRequest()

        for piece in pieces:
            size += piece
            prompt.heard(size, begun)
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(scenario())
    assert sum(sent) <= 10 * max(size, window)
    # Each brings another window, and none is sent before there is one.
    windows = [(each - AHEAD_BYTES) // window for each in sent]
    assert all(windows)
    assert sorted(set(windows)) == windows
    if size >= window + AHEAD_BYTES:
        assert size - sent[-1] < window + size // 8 + 3 * SECOND

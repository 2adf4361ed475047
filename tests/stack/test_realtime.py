"""A realtime conversation with the real stack, by OpenAI's own client."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from omnirelay import AudioPart, ChatMessage, Client, GenerateRequest, SamplingOverrides, TextPart, VideoPart
from omnirelay.content import ContentPart
from omnirelay.events import DoneEvent
from tests.support.answers import Reference
from tests.support.camera import frames, said, video_file
from tests.support.conversations import Conversation, Item, Processor, Turn, expected
from tests.support.http import Readings, get
from tests.support.media import encode_audio, speech
from tests.support.stack import RunningStack

PUSH_TO_TALK: Any = {"type": "realtime", "audio": {"input": {"turn_detection": None}}}

INSTRUCTIONS = "You listen to a long question, and answer it only when it has ended."
WORDS = speech(
    "I would like to know what you think of the weather of tomorrow, and of that after it.", 24_000
)
QUESTION = np.tile(WORDS, 3)[: 9 * 24_000]
# Loudest at its start: what comes later changes no window.
QUESTION[:2400] = 0.99 * np.sin(np.arange(2400) / 4)
TEXT_TOKENS = 16


async def take(connection: AsyncRealtimeConnection, last: str) -> list[Any]:
    events: list[Any] = []
    while not events or events[-1].type != last:
        events.append(await connection.recv())
        assert events[-1].type != "error", events[-1]
    return events


async def nothing_held(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        while True:
            stages = (await http.get("/health")).json()["stages"]
            if not any(
                stage["load"][name] for stage in stages for name in ("running", "waiting", "held_bytes")
            ):
                return
            await asyncio.sleep(0.05)


@pytest.fixture
def url(stack: RunningStack) -> str:
    address: str = stack.config["gateway"]["http"]
    return address.replace("tcp:", "http:")


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[AsyncRealtimeConnection]:
    """A session that answers in text, in which turns are committed by hand."""
    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as ai,
        ai.realtime.connect(model="omnirelay") as connection,
    ):
        session: Any = {**PUSH_TO_TALK, "instructions": INSTRUCTIONS, "output_modalities": ["text"]}
        await connection.session.update(session=session)
        yield connection
    await nothing_held(url)


async def answered(connection: AsyncRealtimeConnection) -> Any:
    """The response to what was said."""
    await connection.input_audio_buffer.commit()
    await connection.response.create(response={"max_output_tokens": TEXT_TOKENS})
    return (await take(connection, "response.done"))[-1].response


async def say(connection: AsyncRealtimeConnection, data: bytes) -> None:
    await connection.input_audio_buffer.append(audio=base64.b64encode(data).decode())


async def computed_early(url: str, count: int) -> None:
    """Wait until so many beginnings of prompts have been computed."""
    while True:
        told = Readings((await asyncio.to_thread(get, url, "/metrics")).metrics.values())
        if told("omnirelay_early_prefills_total", outcome="computed") >= count:
            return
        await asyncio.sleep(0.05)


def by_client(stack: RunningStack, part: ContentPart, **options: Any) -> DoneEvent:
    """The answer in text to a file, over the other protocol."""
    messages = [ChatMessage("system", [TextPart(INSTRUCTIONS)]), ChatMessage("user", [part])]
    sampling = SamplingOverrides(max_tokens=TEXT_TOKENS, temperature=0.0)
    request = GenerateRequest(messages=messages, speech=False, text_sampling=sampling, **options)
    with Client(stack.address) as client:
        return client.chat(request).result().done


async def test_a_question_is_computed_while_it_is_asked_and_the_answer_is_transformers(
    stack: RunningStack, url: str, processor: Processor, reference: Reference
) -> None:
    http = stack.config["gateway"]["http"]
    pcm = (QUESTION * 32767).astype("<i2")
    wav = encode_audio(pcm.astype(np.float32) / np.float32(32768), 24_000, "wav")
    data = pcm.tobytes()
    told = Readings((await asyncio.to_thread(get, http, "/metrics")).metrics.values())
    before = int(told("omnirelay_early_prefills_total", outcome="computed"))
    async with connected(url) as connection:
        for count, (begin, end) in enumerate(((0, 120_000), (120_000, 312_000)), start=1):
            await say(connection, data[begin:end])
            await computed_early(http, before + count)
        await say(connection, data[312_000:])
        response = await answered(connection)
    turns = (Turn("system", (INSTRUCTIONS,)), Turn("user", (Item("audio", wav),)))
    answer = expected(Conversation(turns), processor, reference, TEXT_TOKENS)
    done = by_client(stack, AudioPart(data=memoryview(wav)))
    assert done.text_token_ids == answer.text
    assert response.output[0].content[0].text == done.text
    # Blocks are of 32 tokens at most: the first of them ends within the recording.
    cached = response.usage.input_token_details.cached_tokens
    assert 100 < cached < len(answer.prompt), (cached, len(answer.prompt))


async def test_what_a_camera_sees_while_the_user_speaks_is_a_video_file_to_transformers(
    stack: RunningStack, url: str, processor: Processor, reference: Reference
) -> None:
    pictures, pcm = frames(6), said(3)
    async with connected(url) as connection:
        for at, picture in enumerate(pictures):
            image = base64.b64encode(picture).decode()
            event: Any = {"type": "input_video_buffer.append", "image": image, "time_ms": 500 * at}
            await connection.send(event)
            await say(connection, pcm[24_000 * at : 24_000 * (at + 1)])
        response = await answered(connection)
    file = Item("video", video_file(pictures, pcm))
    turns = (Turn("system", (INSTRUCTIONS,)), Turn("user", (file,)))
    answer = expected(Conversation(turns, use_audio_in_video=True), processor, reference, TEXT_TOKENS)
    assert response.usage.input_tokens == len(answer.prompt)
    done = by_client(stack, VideoPart(data=memoryview(file.data)), use_audio_in_video=True)
    assert done.text_token_ids == answer.text
    assert response.output[0].content[0].text == done.text

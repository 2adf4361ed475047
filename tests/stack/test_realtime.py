"""A realtime conversation with the real stack, by OpenAI's own client, and a call by WebRTC."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from gateway.http.encoding.g711 import to_codes
from omnirelay import AudioPart, ChatMessage, Client, GenerateRequest, SamplingOverrides, TextPart, VideoPart
from omnirelay.content import ContentPart
from omnirelay.events import DoneEvent
from shared.families import SPEECH_SYSTEM_PROMPT
from tests.gateway.caller import calling
from tests.gateway.fake_stages import until
from tests.support.answers import Answer, Reference
from tests.support.camera import frames, said, video_file
from tests.support.conversations import Conversation, Item, Processor, Turn
from tests.support.http import Readings, get
from tests.support.media import encode_audio, speech
from tests.support.stack import RunningStack

SAID = (speech("How are you?", 24_000) * 32767).astype("<i2").tobytes()
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
async def connected(url: str, **settings: Any) -> AsyncIterator[AsyncRealtimeConnection]:
    """A session in which turns are committed by hand, and of further settings."""
    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as ai,
        ai.realtime.connect(model="omnirelay") as connection,
    ):
        await connection.session.update(session=PUSH_TO_TALK)
        if settings:
            more: Any = {"type": "realtime", **settings}
            await connection.session.update(session=more)
        yield connection
    await nothing_held(url)


async def say(connection: AsyncRealtimeConnection, data: bytes) -> None:
    await connection.input_audio_buffer.append(audio=base64.b64encode(data).decode())


async def test_speech_in_speech_out_and_an_interruption(url: str) -> None:
    async with connected(url) as connection:
        for at in range(0, len(SAID), 9_600):
            await say(connection, SAID[at : at + 9_600])
        await connection.input_audio_buffer.commit()
        await connection.response.create()
        events = await take(connection, "response.done")
        response = events[-1].response
        assert response.status in {"completed", "incomplete"}
        pieces = [base64.b64decode(e.delta) for e in events if e.type == "response.output_audio.delta"]
        samples = np.frombuffer(b"".join(pieces), "<i2")
        assert samples.size == 480 * response.usage.output_token_details.audio_tokens > 0
        assert np.abs(samples).max() > 300
        # Spoken again while the next answer comes: it is cancelled, at every stage.
        await connection.response.create()
        await take(connection, "response.output_audio_transcript.delta")
        await say(connection, SAID)
        await connection.input_audio_buffer.commit()
        cancelled = (await take(connection, "response.done"))[-1].response
        assert cancelled.status == "cancelled"
        await nothing_held(url)
        # The earlier turns are in the prompt; so is their system message, which answers in text have not.
        instructions = SPEECH_SYSTEM_PROMPT
        await connection.response.create(
            response={"output_modalities": ["text"], "instructions": instructions}
        )
        last = (await take(connection, "response.done"))[-1].response
        assert last.usage.input_tokens > response.usage.input_tokens


async def test_telephone_speech_at_another_speed(url: str) -> None:
    codes = to_codes(np.frombuffer(SAID, "<i2")[::3], "pcmu")
    form = {"type": "audio/pcmu"}

    audio = {"input": {"format": form}, "output": {"format": form, "speed": 1.5}}
    async with connected(url, audio=audio) as connection:
        await say(connection, codes)
        await connection.input_audio_buffer.commit()
        await connection.response.create()
        events = await take(connection, "response.done")
        pieces = [base64.b64decode(e.delta) for e in events if e.type == "response.output_audio.delta"]
        tokens = events[-1].response.usage.output_token_details.audio_tokens
        assert tokens > 0
        assert len(b"".join(pieces)) == -(-round(480 * tokens / 1.5) // 3)


async def computed_early(url: str, count: int) -> None:
    """Wait until so many beginnings of prompts have been computed."""
    while True:
        told = Readings((await asyncio.to_thread(get, url, "/metrics")).metrics.values())
        if told("omnirelay_early_prefills_total", outcome="computed") >= count:
            return
        await asyncio.sleep(0.05)


def expected(reference: Reference, processor: Processor, conversation: Conversation) -> Answer:
    (answer,) = reference.answers_to(
        processor.inputs(conversation),
        use_audio_in_video=conversation.use_audio_in_video,
        thinker_max_new_tokens=TEXT_TOKENS,
        talker_max_new_tokens=2,
    )
    return answer


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
    async with connected(url, instructions=INSTRUCTIONS, output_modalities=["text"]) as connection:
        for count, (begin, end) in enumerate(((0, 120_000), (120_000, 312_000)), start=1):
            await say(connection, data[begin:end])
            await computed_early(http, before + count)
        await say(connection, data[312_000:])
        await connection.input_audio_buffer.commit()
        await connection.response.create(response={"max_output_tokens": TEXT_TOKENS})
        response = (await take(connection, "response.done"))[-1].response
    turns = (Turn("system", (INSTRUCTIONS,)), Turn("user", (Item("audio", wav),)))
    answer = expected(reference, processor, Conversation(turns))
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

    async with connected(url, instructions=INSTRUCTIONS, output_modalities=["text"]) as connection:
        for at, picture in enumerate(pictures):
            image = base64.b64encode(picture).decode()
            event: Any = {"type": "input_video_buffer.append", "image": image, "time_ms": 500 * at}
            await connection.send(event)
            await say(connection, pcm[24_000 * at : 24_000 * (at + 1)])
        await connection.input_audio_buffer.commit()
        await connection.response.create(response={"max_output_tokens": TEXT_TOKENS})
        response = (await take(connection, "response.done"))[-1].response
    file = Item("video", video_file(pictures, pcm))
    turns = (Turn("system", (INSTRUCTIONS,)), Turn("user", (file,)))
    answer = expected(reference, processor, Conversation(turns, use_audio_in_video=True))
    assert response.usage.input_tokens == len(answer.prompt)
    done = by_client(stack, VideoPart(data=memoryview(file.data)), use_audio_in_video=True)
    assert done.text_token_ids == answer.text
    assert response.output[0].content[0].text == done.text


async def test_a_call_that_must_be_made_and_a_transcript(url: str) -> None:
    tool: dict[str, Any] = {
        "type": "function",
        "name": "answer",
        "parameters": {
            "type": "object",
            "properties": {"yes": {"type": "boolean"}},
            "required": ["yes"],
            "additionalProperties": False,
        },
    }

    listening = {"input": {"transcription": {"model": "whisper-1"}}}
    async with connected(url, tools=[tool], audio=listening) as connection:
        await say(connection, SAID)
        await connection.input_audio_buffer.commit()
        await connection.response.create(response={"tool_choice": "required", "max_output_tokens": 64})
        response = (await take(connection, "response.done"))[-1].response
        if response.status == "completed":
            [call] = response.output
            assert call.name == "answer"
            assert json.loads(call.arguments).keys() == {"yes"}
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "thanks"}
            await connection.conversation.item.create(item=result)
        else:
            # Without training, a model may fill its answer with white space, which JSON allows.
            assert response.status == "incomplete"
        transcript = "conversation.item.input_audio_transcription.completed"
        assert isinstance((await take(connection, transcript))[-1].transcript, str)


async def test_a_call_by_webrtc(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http, calling(http) as c:
        await c.call({"type": "realtime", "max_output_tokens": 8})
        c.microphone.say(SAID)
        events = await c.take("output_audio_buffer.stopped")
        done = next(each for each in events if each["type"] == "response.done")["response"]
        assert done["status"] in {"completed", "incomplete"}
        kinds = [each["type"] for each in events]
        assert kinds.index("input_audio_buffer.speech_stopped") < kinds.index("response.created")
        begun = kinds.index("output_audio_buffer.started")
        assert kinds.index("response.created") < begun
        await until(lambda: c.loud, "a sound")
        assert np.abs(c.sound()).max() > 0.01
        assert (await c.hang_up()).status_code == 200
        await asyncio.wait_for(c.ended.wait(), 60)
    await nothing_held(url)

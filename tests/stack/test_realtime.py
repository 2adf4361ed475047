"""A realtime conversation with the real stack, by OpenAI's own client."""

import asyncio
import base64
import json
from typing import Any

import httpx
import numpy as np
import openai
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from gateway.http.encoding.g711 import to_codes
from omnirelay import AudioPart, ChatMessage, Client, GenerateRequest, SamplingOverrides, TextPart, VideoPart
from shared.families.qwen2_5_omni import SPEECH_SYSTEM_PROMPT
from tests.support.answers import Reference
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


async def test_speech_in_speech_out_and_an_interruption(stack: RunningStack) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")

    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as ai,
        ai.realtime.connect(model="omnirelay") as connection,
    ):
        await connection.session.update(session=PUSH_TO_TALK)
        for at in range(0, len(SAID), 9_600):
            await connection.input_audio_buffer.append(audio=base64.b64encode(SAID[at : at + 9_600]).decode())
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
        await connection.input_audio_buffer.append(audio=base64.b64encode(SAID).decode())
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


async def test_telephone_speech_at_another_speed(stack: RunningStack) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")
    codes = to_codes(np.frombuffer(SAID, "<i2")[::3], "pcmu")
    form = {"type": "audio/pcmu"}

    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as ai,
        ai.realtime.connect(model="omnirelay") as connection,
    ):
        audio = {"input": {"format": form}, "output": {"format": form, "speed": 1.5}}
        settings: Any = {"type": "realtime", "audio": audio}
        await connection.session.update(session=settings)
        await take(connection, "session.updated")
        await connection.input_audio_buffer.append(audio=base64.b64encode(codes).decode())
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


async def test_a_question_is_computed_while_it_is_asked_and_the_answer_is_transformers(
    stack: RunningStack, processor: Processor, reference: Reference
) -> None:
    http = stack.config["gateway"]["http"]
    url = http.replace("tcp:", "http:")
    pcm = (QUESTION * 32767).astype("<i2")
    wav = encode_audio(pcm.astype(np.float32) / np.float32(32768), 24_000, "wav")

    async def scenario() -> tuple[str, int]:
        async with (
            openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
            ) as ai,
            ai.realtime.connect(model="omnirelay") as connection,
        ):
            await connection.session.update(session=PUSH_TO_TALK)
            settings: Any = {"type": "realtime", "instructions": INSTRUCTIONS, "output_modalities": ["text"]}
            await connection.session.update(session=settings)
            data = pcm.tobytes()
            told = Readings((await asyncio.to_thread(get, http, "/metrics")).metrics.values())
            before = int(told("omnirelay_early_prefills_total", outcome="computed"))
            for index, seconds in enumerate((2.5, 6.5)):
                begin = int((0, 2.5)[index] * 48_000)
                piece = base64.b64encode(data[begin : int(seconds * 48_000)]).decode()
                await connection.input_audio_buffer.append(audio=piece)
                await computed_early(http, before + index + 1)
            await connection.input_audio_buffer.append(
                audio=base64.b64encode(data[int(6.5 * 48_000) :]).decode()
            )
            await connection.input_audio_buffer.commit()
            await connection.response.create(response={"max_output_tokens": TEXT_TOKENS})
            response = (await take(connection, "response.done"))[-1].response
        await nothing_held(url)
        return response.output[0].content[0].text, response.usage.input_token_details.cached_tokens

    text, cached = await scenario()
    conversation = Conversation((Turn("system", (INSTRUCTIONS,)), Turn("user", (Item("audio", wav),))))
    (answer,) = reference.answers_to(
        processor.inputs(conversation),
        use_audio_in_video=False,
        thinker_max_new_tokens=TEXT_TOKENS,
        talker_max_new_tokens=2,
    )
    messages = [
        ChatMessage("system", [TextPart(INSTRUCTIONS)]),
        ChatMessage("user", [AudioPart(data=memoryview(wav))]),
    ]
    sampling = SamplingOverrides(max_tokens=TEXT_TOKENS, temperature=0.0)
    with Client(stack.config["gateway"]["listen"]) as client:
        done = (
            client.chat(GenerateRequest(messages=messages, speech=False, text_sampling=sampling))
            .result()
            .done
        )
    assert done.text_token_ids == answer.text
    assert text == done.text
    # Blocks are of 32 tokens at most: the first of them ends within the recording.
    assert 100 < cached < len(answer.prompt), (cached, len(answer.prompt))


async def test_what_a_camera_sees_while_the_user_speaks_is_a_video_file_to_transformers(
    stack: RunningStack, processor: Processor, reference: Reference
) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")
    pictures, pcm = frames(6), said(3)

    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as ai,
        ai.realtime.connect(model="omnirelay") as connection,
    ):
        await connection.session.update(session=PUSH_TO_TALK)
        settings: Any = {"type": "realtime", "instructions": INSTRUCTIONS, "output_modalities": ["text"]}
        await connection.session.update(session=settings)
        for at, picture in enumerate(pictures):
            image = base64.b64encode(picture).decode()
            event: Any = {"type": "input_video_buffer.append", "image": image, "time_ms": 500 * at}
            await connection.send(event)
            piece = base64.b64encode(pcm[24_000 * at : 24_000 * (at + 1)]).decode()
            await connection.input_audio_buffer.append(audio=piece)
        await connection.input_audio_buffer.commit()
        await connection.response.create(response={"max_output_tokens": TEXT_TOKENS})
        response = (await take(connection, "response.done"))[-1].response
    file = Item("video", video_file(pictures, pcm))
    turns = (Turn("system", (INSTRUCTIONS,)), Turn("user", (file,)))
    (answer,) = reference.answers_to(
        processor.inputs(Conversation(turns, use_audio_in_video=True)),
        use_audio_in_video=True,
        thinker_max_new_tokens=TEXT_TOKENS,
        talker_max_new_tokens=2,
    )
    assert response.usage.input_tokens == len(answer.prompt)
    messages = [
        ChatMessage("system", [TextPart(INSTRUCTIONS)]),
        ChatMessage("user", [VideoPart(data=memoryview(file.data))]),
    ]
    sampling = SamplingOverrides(max_tokens=TEXT_TOKENS, temperature=0.0)
    request = GenerateRequest(
        messages=messages, speech=False, use_audio_in_video=True, text_sampling=sampling
    )
    with Client(stack.config["gateway"]["listen"]) as client:
        done = client.chat(request).result().done
    assert done.text_token_ids == answer.text
    assert response.output[0].content[0].text == done.text


async def test_a_call_that_must_be_made_and_a_transcript(stack: RunningStack) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")
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

    async with (
        openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as ai,
        ai.realtime.connect(model="omnirelay") as connection,
    ):
        await connection.session.update(session=PUSH_TO_TALK)
        listening = {"transcription": {"model": "whisper-1"}}
        settings: Any = {"type": "realtime", "tools": [tool], "audio": {"input": listening}}
        await connection.session.update(session=settings)
        await connection.input_audio_buffer.append(audio=base64.b64encode(SAID).decode())
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
    await nothing_held(url)

"""Qwen3-Omni by the interfaces that people use: realtime, chat completions, speech, batches, commands."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from omnirelay import AudioPart, ChatMessage, Client, GenerateRequest, SamplingOverrides, TextPart
from tests.stack.test_realtime import PUSH_TO_TALK, computed_early, nothing_held, take
from tests.support.http import Readings, get
from tests.support.media import encode_audio, picture, speech
from tests.support.stack import RunningStack, make_config

pytestmark = pytest.mark.long

INSTRUCTIONS = "You listen to a long question, and answer it when it has ended."
WINDOW_S = 8
QUESTION = np.tile(speech("I would like to know what you think of the weather of tomorrow.", 24_000), 4)
QUESTION = QUESTION[: (WINDOW_S + 3) * 24_000]
# Loudest at its start: what comes later changes no window.
QUESTION[:2400] = 0.99 * np.sin(np.arange(2400) / 4)
PCM = (QUESTION * 32767).astype("<i2")
TOKENS = 8
FRAME = 1920


@pytest.fixture(scope="module")
def stack(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    limits = {"max_codec_tokens": 30, "max_text_tokens": 64}
    with RunningStack(
        make_config(checkpoint, gateway={"limits": limits}), tmp_path_factory.mktemp("stack")
    ) as running:
        yield running


@pytest.fixture
async def ai(stack: RunningStack) -> Any:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    await nothing_held(url)


async def test_a_window_is_computed_while_its_question_is_asked(stack: RunningStack, ai: Any) -> None:
    http = stack.config["gateway"]["http"]
    before = int(
        Readings(get(http, "/metrics").metrics.values())("omnirelay_early_prefills_total", outcome="computed")
    )
    async with ai.realtime.connect(model="omnirelay") as connection:
        await connection.session.update(session=PUSH_TO_TALK)
        settings: Any = {"type": "realtime", "instructions": INSTRUCTIONS, "output_modalities": ["text"]}
        await connection.session.update(session=settings)
        for begin, end in ((0, WINDOW_S + 1), (WINDOW_S + 1, WINDOW_S + 3)):
            piece = PCM[begin * 24_000 : end * 24_000].tobytes()
            await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())
            if begin == 0:
                await computed_early(http, before + 1)
        await connection.input_audio_buffer.commit()
        await connection.response.create(response={"max_output_tokens": TOKENS})
        response = (await take(connection, "response.done"))[-1].response
    wav = encode_audio(PCM.astype(np.float32) / np.float32(32768), 24_000, "wav")
    messages = [
        ChatMessage("system", [TextPart(INSTRUCTIONS)]),
        ChatMessage("user", [AudioPart(data=memoryview(wav))]),
    ]
    sampling = SamplingOverrides(max_tokens=TOKENS, temperature=0.0)
    with Client(stack.config["gateway"]["listen"]) as client:
        request = GenerateRequest(messages=messages, speech=False, text_sampling=sampling)
        assert response.output[0].content[0].text == client.chat(request).result().done.text
    # A second is 13 tokens.
    assert response.usage.input_token_details.cached_tokens >= 13 * (WINDOW_S - 2)


async def test_a_spoken_turn_is_answered_aloud(ai: Any) -> None:
    async with ai.realtime.connect(model="omnirelay") as connection:
        await connection.session.update(session={"type": "realtime", "audio": {"output": {"voice": "aiden"}}})
        await connection.session.update(session=PUSH_TO_TALK)
        await connection.input_audio_buffer.append(audio=base64.b64encode(PCM[:48_000].tobytes()).decode())
        await connection.input_audio_buffer.commit()
        await connection.response.create(response={"max_output_tokens": TOKENS})
        events = await take(connection, "response.done")
    pieces = [base64.b64decode(e.delta) for e in events if e.type == "response.output_audio.delta"]
    frames = events[-1].response.usage.output_token_details.audio_tokens
    assert 0 < len(b"".join(pieces)) // 2 <= FRAME * frames


async def test_chat_completions_with_a_picture_a_recording_and_a_function(ai: Any) -> None:
    wav = base64.b64encode(encode_audio(speech(), 16_000, "wav")).decode()
    png = base64.b64encode(picture()).decode()
    function = {"name": "answer", "parameters": {"type": "object", "properties": {"yes": {"enum": [True]}}}}
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}},
        {"type": "input_audio", "input_audio": {"data": wav, "format": "wav"}},
        {"type": "text", "text": "What is that?"},
    ]
    messages: Any = [{"role": "user", "content": parts}]
    spoken = await ai.chat.completions.create(
        model="omnirelay",
        messages=messages,
        modalities=["text", "audio"],
        audio={"voice": "ethan", "format": "wav"},
        max_tokens=TOKENS,
    )
    assert spoken.choices[0].message.audio.data
    tools: Any = [{"type": "function", "function": function}]
    called = await ai.chat.completions.create(
        model="omnirelay", messages=messages, tools=tools, tool_choice="required", max_tokens=64
    )
    choice = called.choices[0]
    assert choice.finish_reason == "length" or choice.message.tool_calls[0].function.name == "answer"


async def test_speech_of_a_text(ai: Any) -> None:
    answer = await ai.audio.speech.create(
        model="omnirelay", voice="chelsie", input="Hello there.", response_format="pcm"
    )
    assert len(answer.content) > 2 * FRAME

"""openai: every call that the server knows, at its defaults."""

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Literal

from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

BASE_URL, RECORDING = os.environ["OPENAI_BASE_URL"], Path(os.environ["RECORDING"])
MODEL = "omnirelay"
QUESTION = "What is twenty plus sixteen?"
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}


class Parity(BaseModel):
    parity: Literal["even", "odd"]


client = OpenAI(base_url=BASE_URL, api_key="none")


def encoded(pcm: bytes) -> str:
    return base64.b64encode(pcm).decode()


def chats() -> dict[str, object]:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    spoken = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
    )
    data, transcript = "", ""
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": "pcm16"},
        stream=True,
    ):
        if audio := chunk.choices[0].delta.audio:
            data += audio.data or ""
            transcript += audio.transcript or ""
    heard = client.chat.completions.create(
        model=MODEL,
        messages=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_audio",
                        "input_audio": {
                            "data": base64.b64encode(RECORDING.read_bytes()).decode(),
                            "format": "wav",
                        },
                    }
                ],
            }
        ],
    )
    return {
        "chat": answer.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usage": chunks[-1].usage.completion_tokens,
        "spoken": spoken.choices[0].message.audio.transcript,
        "speech": spoken.choices[0].message.audio.data,
        "streamed transcript": transcript,
        "streamed speech": data,
        "heard": heard.choices[0].message.content,
    }


def functions() -> dict[str, object]:
    asked = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required"
    )
    call = asked.choices[0].message.tool_calls[0]
    result = client.chat.completions.create(
        model=MODEL,
        messages=[
            *MESSAGES,
            asked.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ],
        tools=[TOOL],
    )
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Parity)
    return {
        "function": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "after its result": result.choices[0].finish_reason,
        "structured": parsed.choices[0].message.parsed.parity,
    }


def others() -> dict[str, object]:
    speech = client.audio.speech.create(model=MODEL, voice="alloy", input="thirty six", response_format="pcm")
    with client.audio.speech.with_streaming_response.create(
        model=MODEL, voice="ash", input="thirty six", response_format="pcm"
    ) as streamed:
        pieces = b"".join(streamed.iter_bytes())
    transcript = client.audio.transcriptions.create(model=MODEL, file=RECORDING)
    response = client.responses.create(model=MODEL, input=QUESTION)
    with client.responses.stream(model=MODEL, input=QUESTION) as stream:
        followed = stream.get_final_response()
    completion = client.completions.create(model=MODEL, prompt="one two", max_tokens=4)
    return {
        "models": [each.id for each in client.models.list()],
        "read": encoded(speech.content),
        "streamed reading": encoded(pieces),
        "transcript": transcript.text,
        "response": response.output_text,
        "streamed response": followed.output_text,
        "completion": completion.usage.completion_tokens,
    }


async def realtime() -> dict[str, object]:
    seen: dict[str, object] = {}
    audio = b""
    async with (
        AsyncOpenAI(base_url=BASE_URL, api_key="none") as asynchronous,
        asynchronous.realtime.connect(model=MODEL) as connection,
    ):
        await connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
        )
        await connection.response.create()
        async for event in connection:
            if event.type == "response.output_audio.delta":
                audio += base64.b64decode(event.delta)
            elif event.type == "response.output_audio_transcript.done":
                seen["realtime"] = event.transcript
            elif event.type == "response.done":
                break
            elif event.type == "error":
                raise RuntimeError(event.error.message)
    return {**seen, "realtime speech": encoded(audio)}


if __name__ == "__main__":
    print(json.dumps({**chats(), **functions(), **others(), **asyncio.run(realtime())}))

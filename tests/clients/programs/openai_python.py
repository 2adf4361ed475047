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
        audio={"voice": "alloy", "format": "wav"},
    )
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
        "speech bytes": len(base64.b64decode(spoken.choices[0].message.audio.data)),
        "heard": heard.choices[0].message.content,
    }


def functions() -> dict[str, object]:
    asked = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required"
    )
    call = asked.choices[0].message.tool_calls[0]
    parsed = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Parity)
    return {
        "function": call.function.name,
        "arguments": json.loads(call.function.arguments),
        "structured": parsed.choices[0].message.parsed.parity,
    }


def others() -> dict[str, object]:
    speech = client.audio.speech.create(model=MODEL, voice="alloy", input="thirty six", response_format="pcm")
    with client.audio.speech.with_streaming_response.create(
        model=MODEL, voice="ash", input="thirty six", response_format="pcm"
    ) as streamed:
        pieces = [len(piece) for piece in streamed.iter_bytes()]
    transcript = client.audio.transcriptions.create(model=MODEL, file=RECORDING)
    response = client.responses.create(model=MODEL, input=QUESTION)
    completion = client.completions.create(model=MODEL, prompt="one two", max_tokens=4)
    return {
        "models": [each.id for each in client.models.list()],
        "speech": len(speech.content),
        "streamed speech": sum(pieces),
        "transcript": transcript.text,
        "response": response.output_text,
        "completion": len(completion.choices),
    }


async def realtime() -> dict[str, object]:
    seen: dict[str, object] = {}
    audio = 0
    async with (
        AsyncOpenAI(base_url=BASE_URL, api_key="none") as asynchronous,
        asynchronous.realtime.connect(model=MODEL) as connection,
    ):
        await connection.conversation.item.create(
            item={
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": QUESTION}],
            }
        )
        await connection.response.create()
        async for event in connection:
            if event.type == "response.output_audio.delta":
                audio += len(base64.b64decode(event.delta))
            elif event.type == "response.output_audio_transcript.done":
                seen["realtime"] = event.transcript
            elif event.type == "response.done":
                break
            elif event.type == "error":
                raise RuntimeError(event.error.message)
    return {**seen, "realtime bytes": audio}


if __name__ == "__main__":
    print(json.dumps({**chats(), **functions(), **others(), **asyncio.run(realtime())}))

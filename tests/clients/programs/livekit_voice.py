"""livekit-agents: its OpenAI plugin's LLM, TTS and STT."""

import asyncio
import json
import os
import wave

from livekit import rtc
from livekit.agents import llm, stt
from livekit.agents.utils import http_context
from livekit.agents.voice import io
from livekit.plugins import openai

BASE_URL = os.environ["OPENAI_BASE_URL"]
WHERE = {"base_url": BASE_URL, "api_key": "none", "model": "omnirelay"}
QUESTION = "What is twenty plus sixteen?"


def frames() -> list[rtc.AudioFrame]:
    """The recording in pieces of 100 ms, and a second of silence behind it."""
    with wave.open(os.environ["RECORDING"]) as file:
        rate = file.getframerate()
        pcm = file.readframes(file.getnframes()) + bytes(2 * rate)
    step = 2 * rate // 10
    pieces = [pcm[at : at + step] for at in range(0, len(pcm) - step + 1, step)]
    return [rtc.AudioFrame(piece, rate, 1, step // 2) for piece in pieces]


async def streamed(model: str) -> str:
    """What streaming recognition hears; by the model, the server ends turns or the plugin does."""
    recognizer = openai.STT(**WHERE | {"model": model}, use_realtime=True)
    async with asyncio.timeout(60), http_context.open(), recognizer.stream() as stream:
        microphone = Microphone()
        speaking = asyncio.create_task(speak(microphone, stream))
        async for event in stream:
            if event.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
                speaking.cancel()
                return event.alternatives[0].text
    raise EOFError("the stream ended before its transcript")


async def speak(microphone: io.AudioInput, stream: stt.SpeechStream) -> None:
    async for frame in microphone:
        stream.push_frame(frame)


async def parts() -> dict[str, object]:
    context = llm.ChatContext.empty()
    context.add_message(role="user", content=QUESTION)
    async with openai.LLM(**WHERE).chat(chat_ctx=context) as stream:
        said = "".join([chunk.delta.content or "" async for chunk in stream if chunk.delta])
    responses = openai.responses.LLM(**WHERE | {"base_url": f"{BASE_URL}/responses"})
    async with http_context.open(), responses.chat(chat_ctx=context) as stream:
        responded = "".join([chunk.delta.content or "" async for chunk in stream if chunk.delta])
    async with openai.TTS(**WHERE).synthesize("thirty six") as speech:
        seconds = sum([event.frame.duration async for event in speech])
    heard = await openai.STT(**WHERE).recognize(frames())
    transcripts = [await streamed(model) for model in ("gpt-4o-mini-transcribe", "gpt-realtime-whisper")]
    return {
        "streamed": transcripts,
        "chat": said,
        "response": responded,
        "speech seconds": seconds,
        "transcript": heard.alternatives[0].text,
    }


class Microphone(io.AudioInput):
    """Says the recording in real time, then nothing."""

    def __init__(self) -> None:
        super().__init__(label="recording")
        self._frames = iter(frames())

    async def __anext__(self) -> rtc.AudioFrame:
        frame = next(self._frames, None)
        if frame is None:
            await asyncio.Event().wait()
        await asyncio.sleep(0.1)
        return frame


if __name__ == "__main__":
    print(json.dumps(asyncio.run(parts())))

"""openai-agents: Runner with a function, VoicePipeline, and a realtime session that is spoken to."""

import asyncio
import json
import os
import wave

import numpy as np
from agents import (
    Agent,
    Runner,
    set_default_openai_client,
    set_tracing_disabled,
)
from agents.realtime import RealtimeAgent, RealtimeRunner
from agents.voice import AudioInput, SingleAgentVoiceWorkflow, VoicePipeline, VoicePipelineConfig
from agents.voice.models.openai_model_provider import OpenAIVoiceModelProvider
from openai import AsyncOpenAI

BASE_URL = os.environ["OPENAI_BASE_URL"]
client = AsyncOpenAI(base_url=BASE_URL, api_key="none")
set_default_openai_client(client)
set_tracing_disabled(True)


def recording() -> np.ndarray:
    """24 kHz, as the package's own recorders give it."""
    with wave.open(os.environ["RECORDING"]) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        at = np.arange(0, len(samples), file.getframerate() / 24000)
    return np.interp(at, np.arange(len(samples)), samples).astype(np.int16)


async def text() -> dict[str, object]:
    agent = Agent(name="Assistant", model="omnirelay")
    result = await Runner.run(agent, "What is twenty plus sixteen?")
    streamed = Runner.run_streamed(agent, "What is twenty plus sixteen?")
    events = [event.type async for event in streamed.stream_events()]
    return {"answer": result.final_output, "streamed": streamed.final_output, "events": len(events)}


async def voice() -> dict[str, object]:
    pipeline = VoicePipeline(
        workflow=SingleAgentVoiceWorkflow(Agent(name="Assistant", model="omnirelay")),
        stt_model="omnirelay",
        tts_model="omnirelay",
        config=VoicePipelineConfig(model_provider=OpenAIVoiceModelProvider(openai_client=client)),
    )
    result = await pipeline.run(AudioInput(buffer=recording()))
    samples = 0
    async for event in result.stream():
        if event.type == "voice_stream_event_audio":
            samples += len(event.data)
        elif event.type == "voice_stream_event_error":
            raise event.error
    return {"voice samples": samples}


async def realtime() -> dict[str, object]:
    runner = RealtimeRunner(
        RealtimeAgent(name="Assistant", instructions="Answer."),
        config={"model_settings": {"model_name": "omnirelay"}},
    )
    url = BASE_URL.replace("http", "ws", 1) + "/realtime?model=omnirelay"
    heard, said = 0, ""
    async with await runner.run(model_config={"url": url, "api_key": "none"}) as session:
        pcm = recording().tobytes() + bytes(48000)
        for at in range(0, len(pcm), 4800):
            await session.send_audio(pcm[at : at + 4800])
            await asyncio.sleep(0.1)
        async for event in session:
            if event.type == "audio":
                heard += len(event.audio.data)
            elif event.type == "error":
                raise RuntimeError(event.error)
            elif event.type == "history_updated":
                for item in event.history:
                    if item.type == "message" and item.role == "assistant":
                        said = "".join(getattr(part, "transcript", "") or "" for part in item.content)
            elif event.type == "agent_end":
                break
    return {"realtime bytes": heard, "realtime": said}


async def main() -> None:
    print(json.dumps({**await text(), **await voice(), **await realtime()}))


if __name__ == "__main__":
    asyncio.run(main())

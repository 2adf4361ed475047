"""An OpenAI Agents voice app: a spoken question in a WAV file, the answer in another one.

pip install "openai-agents[voice]"
python agents_voice.py question.wav answer.wav
"""

import argparse
import asyncio
import os
import wave

import numpy as np
from agents import Agent, function_tool, set_default_openai_client, set_tracing_disabled
from agents.voice import AudioInput, SingleAgentVoiceWorkflow, VoicePipeline, VoicePipelineConfig
from agents.voice.models.openai_model_provider import OpenAIVoiceModelProvider
from openai import AsyncOpenAI

client = AsyncOpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
set_default_openai_client(client)
# It would go to OpenAI, whatever the base URL.
set_tracing_disabled(True)


@function_tool
def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"It is sunny in {city}."


async def ask(question: str, answer: str) -> None:
    """Answer a WAV file by another one."""
    agent = Agent(name="Assistant", model="omnirelay", tools=[weather])
    pipeline = VoicePipeline(
        workflow=SingleAgentVoiceWorkflow(agent),
        stt_model="omnirelay",
        tts_model="omnirelay",
        config=VoicePipelineConfig(model_provider=OpenAIVoiceModelProvider(openai_client=client)),
    )
    with wave.open(question) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        spoken = AudioInput(buffer=samples, frame_rate=file.getframerate())
    result = await pipeline.run(spoken)
    with wave.open(answer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        async for event in result.stream():
            if event.type == "voice_stream_event_audio":
                file.writeframes(event.data.astype(np.int16).tobytes())
            elif event.type == "voice_stream_event_error":
                raise event.error


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", metavar="QUESTION.wav")
    parser.add_argument("answer", metavar="ANSWER.wav")
    arguments = parser.parse_args()
    asyncio.run(ask(arguments.question, arguments.answer))

"""openai-agents: Runner, also with a function, and VoicePipeline."""

import asyncio
import base64
import json
import os
import wave
from typing import Literal

import numpy as np
from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_default_openai_responses_transport,
    set_tracing_disabled,
)
from agents.voice import (
    AudioInput,
    SingleAgentVoiceWorkflow,
    SingleAgentWorkflowCallbacks,
    StreamedAudioInput,
    VoicePipeline,
    VoicePipelineConfig,
)
from agents.voice.models.openai_model_provider import OpenAIVoiceModelProvider
from openai import AsyncOpenAI
from pydantic import BaseModel

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


class Parity(BaseModel):
    """An answer of a form."""

    parity: Literal["even", "odd"]


calls: list[str] = []


@function_tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    calls.append(city)
    return f"It is sunny in {city}."


async def text() -> dict[str, object]:
    agent = Agent(name="Assistant", model="omnirelay")
    caller = Agent(
        name="Caller",
        model="omnirelay",
        tools=[weather],
        model_settings=ModelSettings(tool_choice="required"),
    )
    called = await Runner.run(caller, "What is twenty plus sixteen?")
    result = await Runner.run(agent, "What is twenty plus sixteen?")
    streamed = Runner.run_streamed(agent, "What is twenty plus sixteen?")
    events = [event.type async for event in streamed.stream_events()]
    return {
        "calls": calls[:],
        "after a call": called.final_output,
        "answer": result.final_output,
        "streamed": streamed.final_output,
        "events": len(events),
    }


async def responses() -> dict[str, object]:
    """A form beside functions, and turns that continue each other, over a WebSocket."""
    former = Agent(
        name="Former",
        model="omnirelay",
        tools=[weather],
        output_type=Parity,
        tool_use_behavior="stop_on_first_tool",
    )
    formed = await Runner.run(former, "Is seven even?")
    set_default_openai_responses_transport("websocket")
    agent = Agent(name="Assistant", model="omnirelay")
    first = await Runner.run(agent, "What is twenty plus sixteen?")
    second = await Runner.run(
        agent, "What is twenty plus sixteen?", previous_response_id=first.last_response_id
    )
    return {"formed": str(formed.final_output), "by websocket": [first.final_output, second.final_output]}


async def voice() -> dict[str, object]:
    pipeline = VoicePipeline(
        workflow=SingleAgentVoiceWorkflow(Agent(name="Assistant", model="omnirelay")),
        stt_model="omnirelay",
        tts_model="omnirelay",
        config=VoicePipelineConfig(model_provider=OpenAIVoiceModelProvider(openai_client=client)),
    )
    result = await pipeline.run(AudioInput(buffer=recording()))
    speech = b""
    async for event in result.stream():
        if event.type == "voice_stream_event_audio":
            speech += event.data.tobytes()
        elif event.type == "voice_stream_event_error":
            raise event.error
    return {"voice": base64.b64encode(speech).decode()}


class Heard(SingleAgentWorkflowCallbacks):
    """Keeps what was heard."""

    def __init__(self) -> None:
        self.transcripts: list[str] = []

    def on_run(self, workflow: SingleAgentVoiceWorkflow, transcription: str) -> None:
        del workflow
        self.transcripts.append(transcription)


async def streamed() -> dict[str, object]:
    """What a pipeline hears of a stream, until that ends."""
    heard, spoken = Heard(), StreamedAudioInput()
    pipeline = VoicePipeline(
        workflow=SingleAgentVoiceWorkflow(Agent(name="Assistant", model="omnirelay"), heard),
        tts_model="omnirelay",
        config=VoicePipelineConfig(model_provider=OpenAIVoiceModelProvider(openai_client=client)),
    )
    result = await pipeline.run(spoken)
    for piece in np.array_split(np.concatenate([recording(), np.zeros(48000, np.int16)]), 40):
        await spoken.add_audio(piece)
        await asyncio.sleep(0.1)
    await spoken.add_audio(None)
    async for event in result.stream():
        if event.type == "voice_stream_event_error":
            raise event.error
    return {"streamed transcripts": heard.transcripts}


async def main() -> None:
    print(json.dumps({**await text(), **await voice(), **await streamed(), **await responses()}))


if __name__ == "__main__":
    asyncio.run(main())

"""A realtime conversation with the real stack, by OpenAI's own client."""

import asyncio
import base64
from collections.abc import Coroutine
from typing import Any

import httpx
import numpy as np
import openai
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from shared.config.gateway import SPEECH_SYSTEM_PROMPT
from tests.support.media import speech
from tests.support.stack import RunningStack

SCENARIO_S = 120.0
SAID = (speech("How are you?", 24_000) * 32767).astype("<i2").tobytes()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SCENARIO_S):
            await scenario

    asyncio.run(bounded())


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


def test_speech_in_speech_out_and_an_interruption(stack: RunningStack) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")

    async def scenario() -> None:
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai,
            ai.realtime.connect(model="omnirelay") as connection,
        ):
            for at in range(0, len(SAID), 9_600):
                await connection.input_audio_buffer.append(
                    audio=base64.b64encode(SAID[at : at + 9_600]).decode()
                )
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

    run(scenario())

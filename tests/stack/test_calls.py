"""A call by WebRTC with the real stack."""

import asyncio

import httpx
import numpy as np

from tests.gateway.caller import calling
from tests.stack.test_realtime import SAID, nothing_held
from tests.support.stack import RunningStack


async def test_speech_in_speech_out(stack: RunningStack) -> None:
    url = stack.config["gateway"]["http"].replace("tcp:", "http:")

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
        async with asyncio.timeout(10):
            while not c.loud:
                await asyncio.sleep(0.02)
        assert np.abs(c.sound()).max() > 0.01
        assert (await c.hang_up()).status_code == 200
        await asyncio.wait_for(c.ended.wait(), 10)
    await nothing_held(url)

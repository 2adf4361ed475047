"""Calls by WebRTC with a real peer: speech both ways, interruptions, endings."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from shared.config import Config
from tests.gateway.bench import run
from tests.gateway.caller import calling
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, cut, http_bench, http_gateway, likeness, melody, speaking
from tests.gateway.test_http_realtime import ANSWER, HELLO, idle
from tests.gateway.test_turns import SENTENCES, said

Configure = Callable[..., Config]
SPEECH = melody(1.2)
CHUNKS = cut(SPEECH, [5760, 11520])


def with_calls(**webrtc: Any) -> dict[str, Any]:
    return http_gateway(webrtc={"enabled": True, "addresses": ["127.0.0.1"], **webrtc})


async def free(b: HttpBench) -> None:
    """Nothing is held for any call any more."""
    await until(lambda: not b.process._context.calls, "the end of the calls")
    await idle(b)


def test_a_spoken_question_gets_a_spoken_answer(configure: Configure) -> None:
    async def scenario() -> None:
        async with http_bench(configure(with_calls())) as b, speaking(b, ANSWER, CHUNKS):
            async with calling(b.http) as c:
                session = await c.call({"type": "realtime", "instructions": "Be brief."})
                assert session["audio"]["input"]["turn_detection"]["type"] == "server_vad"
                c.microphone.say(said(SENTENCES[0]))
                events = await c.take("output_audio_buffer.stopped")
                print([e["type"] for e in events])
                shift, alike = likeness(c.sound(), SPEECH)
                print(shift, alike)
            await free(b)

    run(scenario())

"""openai-agents: a realtime session."""

import os

from agents import set_tracing_disabled
from agents.realtime import RealtimeAgent, RealtimeRunner, RealtimeSession
from conversation import RATE, User, first_of, main

set_tracing_disabled(True)


async def talk(user: User) -> None:
    runner = RealtimeRunner(
        RealtimeAgent(name="Assistant", instructions="Answer."),
        config={"model_settings": {"model_name": "omnirelay", "turn_detection": {"type": "server_vad"}}},
    )
    url = os.environ["OPENAI_BASE_URL"].replace("http", "ws", 1) + "/realtime?model=omnirelay"
    async with await runner.run(model_config={"url": url, "api_key": "none"}) as session:
        await first_of(speak(session, user), listen(session, user), user.converse())


async def speak(session: RealtimeSession, user: User) -> None:
    async for piece in user.microphone():
        await session.send_audio(piece)


async def listen(session: RealtimeSession, user: User) -> None:
    async for event in session:
        if event.type == "audio":
            user.hear(len(event.audio.data) / 2 / RATE)
        elif event.type == "audio_interrupted":
            user.stop()
        elif event.type == "audio_end":
            user.end()
        elif event.type == "history_updated":
            user.said[:] = [
                "".join(getattr(part, "transcript", "") or "" for part in item.content)
                for item in event.history
                if item.type == "message" and item.role == "assistant"
            ]
        elif event.type == "error":
            raise RuntimeError(event.error)


if __name__ == "__main__":
    main(talk)

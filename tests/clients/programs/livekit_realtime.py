"""livekit-agents: the example's session with a realtime model."""

import asyncio

from conversation import PIECE_BYTES, RATE, User, main
from livekit import rtc
from livekit.agents import ConversationItemAddedEvent
from livekit.agents.voice import io
from livekit_agent import agent, voice_session

DEVICE_S = 0.2
"""From the last sample until a device says so; an interrupted answer is flushed, then cleared."""


class Microphone(io.AudioInput):
    """What the user says."""

    def __init__(self, user: User) -> None:
        super().__init__(label="user")
        self._pieces = user.microphone()

    async def __anext__(self) -> rtc.AudioFrame:
        return rtc.AudioFrame(await anext(self._pieces), RATE, 1, PIECE_BYTES // 2)


class Speaker(io.AudioOutput):
    """Plays to the user, in real time."""

    def __init__(self, user: User) -> None:
        super().__init__(label="user", capabilities=io.AudioOutputCapabilities(pause=False))
        self._user = user
        self._taken_s = 0.0
        self._finish: asyncio.TimerHandle | None = None

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        self._taken_s += frame.duration
        self._user.hear(frame.duration)

    def flush(self) -> None:
        super().flush()
        if self._taken_s:
            left_s = self._user.left_s + DEVICE_S
            self._finish = asyncio.get_running_loop().call_later(left_s, self._finished, False)

    def clear_buffer(self) -> None:
        if self._taken_s:
            if self._finish is not None:
                self._finish.cancel()
            self._taken_s -= self._user.left_s
            self._user.stop()
            self._finished(True)

    def _finished(self, interrupted: bool) -> None:
        self._user.end()
        played_s, self._taken_s = self._taken_s, 0.0
        self.on_playback_finished(playback_position=played_s, interrupted=interrupted)


async def talk(user: User) -> None:
    session = voice_session()
    session.input.audio, session.output.audio = Microphone(user), Speaker(user)

    @session.on("conversation_item_added")
    def added(event: ConversationItemAddedEvent) -> None:
        if event.item.type == "message" and event.item.role == "assistant":
            user.said.append(event.item.text_content)

    await session.start(agent=agent())
    await user.converse()
    await session.aclose()


if __name__ == "__main__":
    main(talk)

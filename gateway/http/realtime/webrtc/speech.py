"""The speech of a call's answers, sent at the pace at which it is heard."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame

from gateway.http.realtime.items import BYTES_PER_S, milliseconds
from gateway.http.realtime.transport import Played
from shared.messages import SAMPLE_RATE

FRAME_S: Final = 0.02
FRAME_SAMPLES: Final = int(SAMPLE_RATE * FRAME_S)
FRAME_BYTES: Final = 2 * FRAME_SAMPLES
LATE_S: Final = 0.2
"""Frames that are later than this are not sent at once: the clock goes on from now."""
AHEAD_BYTES: Final = 30 * BYTES_PER_S
"""Speech that may wait to be sent."""
SILENCE: Final = bytes(FRAME_BYTES)


@dataclass
class _Answer:
    place: dict[str, Any]
    begins: float
    pcm: bytearray = field(default_factory=bytearray)
    sent: int = 0
    complete: bool = False


class SpeechTrack(MediaStreamTrack):
    """A track of frames of 20 ms, silent between answers; aiortc resamples and encodes them on a thread.

    Args:
        tell: Called with type and fields of the events that say what is being played.
    """

    kind = "audio"

    def __init__(self, tell: Callable[[str, dict[str, Any]], None]) -> None:
        super().__init__()
        self._tell = tell
        self._answers: deque[_Answer] = deque()
        self._room = asyncio.Event()
        self._due: float | None = None
        self._pts = 0

    async def push(self, place: dict[str, Any], pcm: bytes, delay_s: float) -> None:
        """Append speech of the answer of ``place``, once there is room; the first waits for ``delay_s``."""
        answer = self._of(place)
        if answer is None:
            answer = _Answer(place, asyncio.get_running_loop().time() + delay_s)
            self._answers.append(answer)
        answer.pcm += pcm
        while sum(len(each.pcm) for each in self._answers) > AHEAD_BYTES:
            self._room.clear()
            await self._room.wait()

    def finish(self, place: dict[str, Any]) -> None:
        """No more comes of an answer."""
        answer = self._of(place)
        if answer is not None:
            answer.complete = True

    def clear(self) -> list[Played]:
        """Drop what was not sent, and return what was sent of those answers."""
        cut = [Played(each.place, milliseconds(each.sent)) for each in self._answers]
        self._answers.clear()
        self._room.set()
        return cut

    async def recv(self) -> AudioFrame:
        """Return the next frame when it is due; aiortc calls it."""
        if self.readyState != "live":
            raise MediaStreamError
        now = asyncio.get_running_loop().time()
        if self._due is None or self._due < now - LATE_S:
            self._due = now
        await asyncio.sleep(max(0.0, self._due - now))
        self._due += FRAME_S
        frame = AudioFrame(format="s16", layout="mono", samples=FRAME_SAMPLES)
        frame.planes[0].update(self._next())
        frame.sample_rate = SAMPLE_RATE
        frame.time_base = Fraction(1, SAMPLE_RATE)
        frame.pts = self._pts
        self._pts += FRAME_SAMPLES
        return frame

    def _next(self) -> bytes:
        """Take a frame of the first answer; one that is not whole is its last."""
        while self._answers:
            answer = self._answers[0]
            if len(answer.pcm) < FRAME_BYTES and not answer.complete:
                return SILENCE
            if asyncio.get_running_loop().time() < answer.begins:
                return SILENCE
            told = {"response_id": answer.place["response_id"]}
            if not answer.sent and answer.pcm:
                self._tell("output_audio_buffer.started", told)
            data = bytes(answer.pcm[:FRAME_BYTES])
            del answer.pcm[:FRAME_BYTES]
            answer.sent += len(data)
            if not answer.pcm and answer.complete:
                self._answers.popleft()
                if answer.sent:
                    self._tell("output_audio_buffer.stopped", told)
            self._room.set()
            if data:
                return data.ljust(FRAME_BYTES, b"\0")
        return SILENCE

    def _of(self, place: dict[str, Any]) -> _Answer | None:
        return next((each for each in self._answers if each.place == place), None)

"""Ask about what a camera sees: sound and frames are sent while they are recorded.

Needs `pip install "openai[realtime]" av pillow`, and a program that plays 16-bit samples, 24 kHz, mono:

    SOUND="-q -t raw -f S16_LE -r 24000 -c 1"
    python see_and_talk.py question.mp4 --play "aplay $SOUND"
    python see_and_talk.py rtsp://camera.local/stream --play "aplay $SOUND"
    python see_and_talk.py 0:0 --format avfoundation --play "..."

The source is what FFmpeg opens; it needs pictures and sound.
"""

import argparse
import asyncio
import base64
import io
import os
import shlex
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from typing import Any

import av
from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

FRAME_S = 0.5
"""Between two frames: the model looks at two a second."""
LONGER_SIDE = 448
"""Pixels of a frame: larger ones are more tokens, and are answered later."""
PIECE_S = 0.1

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("source", help="a video file, an address or a device")
parser.add_argument("--format", help="of a device, such as avfoundation or dshow")
parser.add_argument("--play", required=True, metavar="COMMAND", help="plays what it reads")
arguments = parser.parse_args()


def recorded() -> Iterator[dict[str, Any]]:
    """Yield the events with sound and frames, when they are due."""
    resampler, next_s, begun = av.AudioResampler("s16", "mono", 24_000), 0.0, time.monotonic()
    with av.open(arguments.source, format=arguments.format) as source:
        first = None
        for frame in source.decode(audio=0, video=0):
            first = frame.time if first is None else first
            at_s = frame.time - first
            time.sleep(max(0.0, begun + at_s - time.monotonic()))
            if isinstance(frame, av.AudioFrame):
                samples = b"".join(piece.to_ndarray().tobytes() for piece in resampler.resample(frame))
                yield {"type": "input_audio_buffer.append", "audio": base64.b64encode(samples).decode()}
            elif at_s >= next_s:
                next_s = at_s + FRAME_S
                yield {"type": "input_video_buffer.append", "image": jpeg(frame), "time_ms": int(1000 * at_s)}


def jpeg(frame: av.VideoFrame) -> str:
    """Return a small picture as base64."""
    picture, file = frame.to_image(), io.BytesIO()
    picture.thumbnail((LONGER_SIDE, LONGER_SIDE))
    picture.save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


class Speaker:
    """Plays and prints what is answered; a new player begins with each turn of the user."""

    def __init__(self) -> None:
        self.answered = asyncio.Event()
        self._player: Process | None = None

    async def run(self, connection: AsyncRealtimeConnection) -> None:
        """Do so until cancelled."""
        async for event in connection:
            if event.type == "response.output_audio.delta":
                if self._player is None:
                    command = shlex.split(arguments.play)
                    self._player = await asyncio.create_subprocess_exec(*command, stdin=PIPE)
                if self._player.stdin:
                    self._player.stdin.write(base64.b64decode(event.delta))
            elif event.type == "input_audio_buffer.speech_started":
                self.answered.clear()
                if self._player is not None:
                    # The gateway cancels the answer; what is still to be played goes, too.
                    self._player.kill()
                    await self._player.wait()
                    self._player = None
            elif event.type == "response.output_audio_transcript.done":
                print(event.transcript, flush=True)
            elif event.type == "response.done" and event.response.status != "cancelled":
                self.answered.set()
            elif event.type == "error":
                print(f"error: {event.error.message}", flush=True)

    async def finish(self) -> None:
        """Wait until all has been played."""
        if self._player is not None and self._player.stdin:
            self._player.stdin.close()
            await self._player.wait()


async def show(connection: AsyncRealtimeConnection, answered: asyncio.Event) -> None:
    """Send what is recorded, and silence behind it until there is an answer."""
    events = recorded()
    while (event := await asyncio.to_thread(next, events, None)) is not None:
        await connection.send(event)
    silence = base64.b64encode(bytes(int(48_000 * PIECE_S))).decode()
    while not answered.is_set():
        await connection.input_audio_buffer.append(audio=silence)
        await asyncio.sleep(PIECE_S)


async def main() -> None:
    """Hold a session until the recording has been answered."""
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    speaker = Speaker()
    async with (
        AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client,
        client.realtime.connect(model="omnirelay") as connection,
    ):
        showing = asyncio.create_task(show(connection, speaker.answered))
        speaking = asyncio.create_task(speaker.run(connection))
        await asyncio.wait({showing, speaking}, return_when=asyncio.FIRST_COMPLETED)
        # Whatever went wrong in one of them is raised.
        await (showing if showing.done() else speaking)
        await speaker.finish()
        speaking.cancel()


asyncio.run(main())

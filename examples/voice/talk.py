"""Talk with the model through microphone and loudspeaker; it may be interrupted.

Needs `pip install "openai[realtime]"`, and programs that record and play 16-bit samples, 24 kHz, mono:

    SOUND="-q -t raw -f S16_LE -r 24000 -c 1"
    python talk.py --record "arecord $SOUND" --play "aplay $SOUND"
"""

import argparse
import asyncio
import base64
import os
import shlex
from asyncio.subprocess import PIPE, Process

from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection

PIECE = 2 * 2400
"""Bytes of a tenth of a second."""

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--record", required=True, metavar="COMMAND", help="writes what the microphone hears")
parser.add_argument("--play", required=True, metavar="COMMAND", help="plays what it reads")
arguments = parser.parse_args()


async def listen(connection: AsyncRealtimeConnection, recorder: Process) -> None:
    """Send what is recorded until the recorder ends."""
    while recorder.stdout and (piece := await recorder.stdout.read(PIECE)):
        await connection.input_audio_buffer.append(audio=base64.b64encode(piece).decode())


async def speak(connection: AsyncRealtimeConnection) -> None:
    """Play and print what is answered; a new player begins with each turn of the user."""
    player: Process | None = None
    async for event in connection:
        if event.type == "response.output_audio.delta":
            if player is None:
                player = await asyncio.create_subprocess_exec(*shlex.split(arguments.play), stdin=PIPE)
            if player.stdin:
                player.stdin.write(base64.b64decode(event.delta))
        elif event.type == "input_audio_buffer.speech_started" and player is not None:
            # The gateway cancels the answer; what is still to be played goes, too.
            player.kill()
            await player.wait()
            player = None
        elif event.type == "response.output_audio_transcript.done":
            print(event.transcript, flush=True)
        elif event.type == "error":
            print(f"error: {event.error.message}", flush=True)


async def main() -> None:
    """Hold a session until the recorder ends."""
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    async with (
        AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client,
        client.realtime.connect(model="omnirelay") as connection,
    ):
        recorder = await asyncio.create_subprocess_exec(*shlex.split(arguments.record), stdout=PIPE)
        speaking = asyncio.create_task(speak(connection))
        try:
            await listen(connection, recorder)
        finally:
            speaking.cancel()


asyncio.run(main())

"""Talk with the model through microphone and loudspeaker; it may be interrupted, and outlives its network.

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
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.realtime import RealtimeServerEvent
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK

PIECE = 2 * 2400
"""Bytes of a tenth of a second."""
KEPT = 1200
"""Pieces that may have to be sent again."""
LOST = (ConnectionClosed, OSError, TimeoutError)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--record", required=True, metavar="COMMAND", help="writes what the microphone hears")
parser.add_argument("--play", required=True, metavar="COMMAND", help="plays what it reads")
arguments = parser.parse_args()


class Conversation:
    """A session that outlives its connection: docs/api-realtime.md says how."""

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client
        self._connection: AsyncRealtimeConnection | None = None
        self._query: dict[str, object] = {"resume": "true"}
        self._headers: dict[str, str] = {}
        self._sent: deque[str] = deque(maxlen=KEPT)
        self._count = 0

    async def append(self, piece: bytes) -> None:
        """Send what was recorded, now or when there is a connection again."""
        audio = base64.b64encode(piece).decode()
        self._count += 1
        self._sent.append(audio)
        if self._connection is not None:
            with suppress(*LOST):
                await self._connection.input_audio_buffer.append(audio=audio)

    async def events(self) -> AsyncIterator[RealtimeServerEvent]:
        """Give the session's events until the server ends it."""
        while True:
            try:
                async with self._client.realtime.connect(
                    model="omnirelay", extra_query=self._query, extra_headers=self._headers
                ) as connection:
                    await self._begin(connection)
                    async for event in connection:
                        self._query["starting_after"] = getattr(event, "sequence_number", None)
                        yield event
                    return
            except ConnectionClosedOK:
                return
            except LOST:
                self._connection = None
                print("connecting again", flush=True)
                await asyncio.sleep(1)

    async def _begin(self, connection: AsyncRealtimeConnection) -> None:
        first = await connection.recv()
        # Another session hears what is said from now on.
        arrived = getattr(first, "received_events", self._count)
        if first.type == "session.created":
            self._query = {"session_id": getattr(first.session, "id", ""), "starting_after": 0}
            self._headers = {"OmniRelay-Resume-Secret": getattr(first, "resume", {}).get("secret", "")}
            self._count = arrived = 0
        while arrived < self._count:
            await connection.input_audio_buffer.append(audio=self._sent[arrived - self._count])
            arrived += 1
        self._connection = connection


async def listen(conversation: Conversation, recorder: Process) -> None:
    """Send what is recorded until the recorder ends."""
    while recorder.stdout and (piece := await recorder.stdout.read(PIECE)):
        await conversation.append(piece)


async def speak(conversation: Conversation) -> None:
    """Play and print what is answered; a new player begins with each turn of the user."""
    player: Process | None = None
    try:
        async for event in conversation.events():
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
    finally:
        if player is not None and player.stdin:
            player.stdin.close()
            await player.wait()


async def main() -> None:
    """Hold a session until the recorder ends."""
    url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    async with AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        conversation = Conversation(client)
        recorder = await asyncio.create_subprocess_exec(*shlex.split(arguments.record), stdout=PIPE)
        speaking = asyncio.create_task(speak(conversation))
        try:
            await listen(conversation, recorder)
            await recorder.wait()
        finally:
            speaking.cancel()
            with suppress(asyncio.CancelledError):
                await speaking


asyncio.run(main())

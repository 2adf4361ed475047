"""pipecat: the example's bot on the telephone. This program is the carrier: it speaks Twilio's media streams.

Messages as in https://www.twilio.com/docs/voice/media-streams/websocket-messages.
"""

import asyncio
import audioop
import base64
import contextlib
import json
import os
import re
import sys
import urllib.request
import wave
from pathlib import Path

import websockets
from conversation import free_port

RATE = 8000
FRAME = RATE // 50
"""Bytes of 20 ms: μ-law has one a sample."""
SILENCE = b"\xff" * FRAME
QUIET_S = 1.5
"""The answer has ended when nothing came for so long, and the server has nothing to do."""
LONGEST_S = 60.0
STREAM = {"streamSid": "MZ18ad3ab5a668481ce02b83e7395059f0"}
# The bot ends the call at the carrier, too: no such host is there.
CARRIER = {f"TWILIO_{name}": "test" for name in ("ACCOUNT_SID", "AUTH_TOKEN", "REGION", "EDGE")}
CALL = {
    **STREAM,
    "accountSid": "AC_test",
    "callSid": "CA_test",
    "tracks": ["inbound"],
    "customParameters": {},
    "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": RATE, "channels": 1},
}


def question() -> bytes:
    """The recording as a telephone brings it."""
    with wave.open(os.environ["RECORDING"]) as file:
        rate, pcm = file.getframerate(), file.readframes(file.getnframes())
    return audioop.lin2ulaw(audioop.ratecv(pcm, 2, 1, rate, RATE, None)[0], 2)


def webhook(port: int) -> str:
    """Ask where to bring a call, as the carrier does when the telephone rings."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", data=b"", timeout=10) as answer:
        return re.findall(r'<Stream url="(.*?)"', answer.read().decode())[0]


async def speak(call: websockets.ClientConnection) -> None:
    """Send the question after a second of silence, then silence, a frame each 20 ms."""
    pcm = SILENCE * 50 + question()
    frames = [pcm[at : at + FRAME] for at in range(0, len(pcm), FRAME)]
    number, clock = 0, asyncio.get_running_loop()
    begun = clock.time()
    while True:
        payload = frames[number] if number < len(frames) else SILENCE
        media = {"track": "inbound", "chunk": str(number + 1), "timestamp": str(number * 20)}
        media["payload"] = base64.b64encode(payload).decode()
        message = {"event": "media", "sequenceNumber": str(number + 2), "media": media}
        await call.send(json.dumps(message | STREAM))
        number += 1
        await asyncio.sleep(max(0.0, begun + number * 0.02 - clock.time()))


async def listen(call: websockets.ClientConnection) -> bytes:
    """Collect the answer until it ends."""
    heard = bytearray()
    while True:
        try:
            async with asyncio.timeout(QUIET_S if heard else LONGEST_S):
                message = json.loads(await call.recv())
        except TimeoutError:
            if not (heard and await asyncio.to_thread(busy)):
                return bytes(heard)
        else:
            if message["event"] == "media":
                heard += base64.b64decode(message["media"]["payload"])


def busy() -> bool:
    """Whether the server still speaks: a slow one does with pauses."""
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/health"
    with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - the server's
        return any(each["load"]["running"] or each["load"]["waiting"] for each in json.load(answer)["stages"])


async def telephone(port: int) -> bytes:
    async with websockets.connect(f"ws://127.0.0.1:{port}/ws") as call:
        await call.send(json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"}))
        await call.send(json.dumps({"event": "start", "sequenceNumber": "1", "start": CALL, **STREAM}))
        speaking = asyncio.create_task(speak(call))
        heard = await listen(call)
        speaking.cancel()
        await call.send(json.dumps({"event": "stop", "stop": {"callSid": CALL["callSid"]}, **STREAM}))
    return heard


async def ready(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                return
            await asyncio.sleep(0.1)


async def main() -> None:
    port = free_port()
    bot = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]) / "pipecat_bot.py"
    log = Path("bot.log")
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable, bot, "-t", "twilio", "-x", "tunnel.example.com", "--port", str(port),
            env=os.environ | CARRIER,
            stdout=file, stderr=file,
        )  # fmt: skip
    await ready(port)
    told = {"webhook": webhook(port)}
    heard = await telephone(port)
    # The bot's server ends when the call has: it waits for what still runs.
    process.terminate()
    async with asyncio.timeout(30):
        await process.wait()
    (said,) = re.findall(r"Generating TTS \[(.*)\]", log.read_text())
    loudest = audioop.max(audioop.ulaw2lin(heard, 2), 2)
    print(json.dumps(told | {"said": said, "seconds": len(heard) / RATE, "loudest": loudest}))


if __name__ == "__main__":
    asyncio.run(main())

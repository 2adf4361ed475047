"""How soon a spoken question is answered: realtime sessions, spoken to at the speed of speech.

With ``by hand`` the client commits a question and asks for the answer with its last sample: with the prompt
computed while the question is spoken, by each clamp of mel frames, and without.  ``turns`` are found by the
server (``server_vad`` at its defaults), whose wait for the end of a question is counted, too: voice to voice.
"""

import asyncio
import json
import time
import wave
from base64 import b64encode
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.measure.results import Measured, tell
from omnirelay.errors import OmniRelayError

ROOT: Final = Path(__file__).resolve().parents[2]
SPEECH: Final = ROOT / "checkpoint" / "speaking" / "starter.wav"
RATE: Final = 24_000
PIECE_S: Final = 0.1
PIECE_BYTES: Final = 2 * round(PIECE_S * RATE)
TYPED: Final = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "What is that?"}],
}
ANSWER_TOKENS: Final = 8
LATE_S: Final = 600.0
"""Time limit of a question and its answer."""
MOST_CODEC_TOKENS: Final = 500
"""Of any answer; models that were not trained do not end by themselves."""
VAD: Final = {"type": "server_vad"}
WAYS: Final[dict[str, tuple[int, str, dict[str, str] | None]]] = {
    "while it is spoken": (32_768, "recording", None),
    "while it is spoken, causal clamp": (32_768, "causal", None),
    "after its end": (0, "recording", None),
    "turns found by the server": (32_768, "recording", VAD),
}
"""Tokens that may be computed early, the clamp, and who finds the end of a question."""


def question(seconds: float, seed: int) -> bytes:
    """16-bit samples of a voice that asks again and again, which turn detection needs, and a little noise."""
    with wave.open(str(SPEECH)) as file:
        spoken = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
        places = np.arange(0, spoken.size, file.getframerate() / RATE)
    sound = np.resize(np.interp(places, np.arange(spoken.size), spoken), round(seconds * RATE))
    noise = np.random.default_rng(seed).normal(scale=10 ** (-55 / 20), size=sound.size)
    return (np.clip(sound + noise, -1, 1) * 32767).astype("<i2").tobytes()


async def questions(model: Path, lengths: Sequence[float], repeats: int, quick: bool) -> list[Measured]:
    """Type, and ask questions of each length, in each way; the last two ways alone if it is to be quick."""
    rows = []
    for way, (tokens, clamp, turns) in [*WAYS.items()][2 * quick :]:
        limits = {"early_prompt_tokens": tokens, "max_codec_tokens": MOST_CODEC_TOKENS}
        changes = {"gateway": {"limits": limits}, "media": {"audio_clamp": clamp}}
        async with OmniRelay(model, changes) as server:
            seeds = count()
            await ask(server.url, question(1.0, 99), next(seeds), turns)
            for seconds in lengths:
                tell(f"computed {way}, {seconds:g} s")
                asked = [
                    await ask(server.url, question(seconds, seed) if seconds else None, seed, turns)
                    for seed in islice(seeds, repeats)
                ]
                figures = ("first sample after, s", "prompt tokens", "left at the end")
                values = {
                    name: list(each) for name, each in zip(figures, zip(*asked, strict=True), strict=True)
                }
                rows.append(Measured(f"{way}; {f'{seconds:g} s' if seconds else 'typed'}", values))
    return rows


async def ask(
    url: str, pcm: bytes | None, seed: int, turns: dict[str, str] | None = None
) -> tuple[float, int, int]:
    """Speak a question in a session of its own, or type :data:`TYPED`.

    Returns:
        Seconds from the last sample to the first of the answer, tokens of the prompt, and those of them that
        were not in the prefix cache.

    Raises:
        OmniRelayError: The gateway refused an event.
        TimeoutError: The answer did not come.
    """
    address = url.replace("http:", "ws:") + "/v1/realtime?model=omnirelay"
    async with asyncio.timeout(LATE_S), connect(address, max_size=None) as socket:
        # Another one each time, or the prefix cache would have the prompt of an earlier question.
        settings = {
            "type": "realtime",
            "instructions": f"Answer question {seed}.",
            "max_output_tokens": ANSWER_TOKENS,
            "audio": {"input": {"turn_detection": turns}},
        }
        await _send(socket, "session.update", session=settings)
        await _until(socket, "session.updated")
        if pcm is not None:
            await _speak(socket, pcm)
        spoken = time.monotonic()
        silence = None
        if turns and pcm is not None:
            silence = asyncio.create_task(_silence(socket))
        elif pcm is not None:
            await _send(socket, "input_audio_buffer.commit")
        else:
            await _send(socket, "conversation.item.create", item=TYPED)
        if silence is None:
            await _send(socket, "response.create")
        await _until(socket, "response.output_audio.delta")
        first_s = time.monotonic() - spoken
        usage = (await _until(socket, "response.done"))["response"]["usage"]
        if silence is not None:
            silence.cancel()
    tokens = usage["input_tokens"]
    return first_s, tokens, tokens - usage["input_token_details"]["cached_tokens"]


async def _speak(socket: ClientConnection, pcm: bytes) -> None:
    began = time.monotonic()
    for index, start in enumerate(range(0, len(pcm), PIECE_BYTES), 1):
        # A piece is there when its last sample is spoken.
        await asyncio.sleep(began + index * PIECE_S - time.monotonic())
        piece = b64encode(pcm[start : start + PIECE_BYTES]).decode()
        await _send(socket, "input_audio_buffer.append", audio=piece)


async def _silence(socket: ClientConnection) -> None:
    while True:
        await _speak(socket, bytes(PIECE_BYTES))


async def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def _until(socket: ClientConnection, kind: str) -> dict[str, Any]:
    async for text in socket:
        event: dict[str, Any] = json.loads(text)
        if event["type"] == "error":
            raise OmniRelayError(f"the gateway refused an event: {event['error']['message']}")
        if event["type"] == kind:
            return event
    raise OmniRelayError(f"the gateway closed a session that waited for {kind}")

"""How soon a spoken question is answered: ``python -m benchmarks.questions``.

A client speaks a question in a realtime session, at the speed of speech, and asks for the answer with its
last sample.  Measured is the time from then to the first sample of the answer: with the prompt computed while
the question is spoken, by each clamp of mel frames, and without; alone, or beside others that are spoken to.
A question of three typed words is what it should not take much longer than.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count, product
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import yaml
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.adapters.omnirelay import configuration, forced
from benchmarks.measure.checkpoints import SIZES, ensure
from benchmarks.measure.output import tell
from benchmarks.measure.workload import answer_of
from omnirelay import AsyncClient, GenerateRequest
from ops.launcher import Stack, running
from shared.config import Config

RATE: Final = 24_000
PIECE_S: Final = 0.1
LENGTHS_S: Final = (2.0, 10.0, 30.0)
TYPED: Final = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "What is that?"}],
}
OTHERS_S: Final = 10.0
"""Speech of each answer to those beside: 500 codec tokens."""
ANSWER_TOKENS: Final = 8
MOST_CODEC_TOKENS: Final = 500
"""Of any answer; models that were not trained do not end by themselves."""
WAYS: Final[dict[str, tuple[int, str]]] = {
    "while it is spoken": (32_768, "recording"),
    "while it is spoken, causal clamp": (32_768, "causal"),
    "after its end": (0, "recording"),
}
"""Tokens that may be computed early, and the clamp."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Questions of one length, computed in one way.

    Attributes:
        way: See :data:`WAYS`.
        beside: Other clients, each of which is always answered.
        question_s: Length of a question; 0 if it is typed.
        first_audio_s: From the last sample of each question to the first of its answer.
        prompt_tokens: Of each question's prompt.
        cached_tokens: Those of them that the answer found in the prefix cache.
    """

    way: str
    beside: int
    question_s: float
    first_audio_s: list[float]
    prompt_tokens: list[int]
    cached_tokens: list[int]


def question(seconds: float, seed: int) -> bytes:
    """A voice-like sound of 16-bit samples: syllables of changing pitch and loudness, and a little noise."""
    generator = np.random.default_rng(seed)
    samples = round(seconds * RATE)
    syllables = -(-samples // (RATE // 5))
    at = np.arange(samples) / RATE
    loud = np.repeat(generator.uniform(0.1, 0.5, syllables), RATE // 5)[:samples]
    pitch = np.repeat(generator.uniform(100, 220, syllables), RATE // 5)[:samples]
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    voice = sum(np.sin(order * phase) / order for order in range(1, 12)) * np.abs(np.sin(2.5 * np.pi * at))
    sound = 0.5 * loud * voice + 10 ** (-55 / 20) * generator.normal(size=samples)
    return (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()


@asynccontextmanager
async def served(model: Path, way: str) -> AsyncIterator[tuple[str, str]]:
    """Start a stack that computes prompts in one way; gives the addresses of sessions and of TCP clients."""
    tokens, clamp = WAYS[way]
    values = configuration(model, {})
    values["gateway"]["limits"] |= {"early_prompt_tokens": tokens, "max_codec_tokens": MOST_CODEC_TOKENS}
    values["media"] = {"audio_clamp": clamp}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "omnirelay.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        stack = Stack(Config.model_validate(values), path, show=lambda *_: None)
        async with running(stack):
            gateway = values["gateway"]
            yield gateway["http"].replace("tcp:", "ws:") + "/v1/realtime?model=omnirelay", gateway["listen"]


@asynccontextmanager
async def answered(listen: str, clients: int) -> AsyncIterator[None]:
    """Let other clients ask, each again when it has its answer."""

    async def ask(client: int) -> None:
        workload = answer_of(OTHERS_S)
        async with AsyncClient(listen) as connection:
            for number in count(1000 * client):
                asked = GenerateRequest(
                    prompt_token_ids=workload.prompt(number),
                    text_sampling=forced(workload.text_tokens),
                    codec_sampling=forced(workload.codec_tokens),
                )
                await connection.chat(asked).result()

    others = [asyncio.create_task(ask(client)) for client in range(1, clients + 1)]
    try:
        await asyncio.sleep(OTHERS_S / 2 if others else 0)
        yield
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)


async def ask(address: str, pcm: bytes | None, seed: int) -> tuple[float, int, int]:
    """Speak a question in a session of its own, or type :data:`TYPED`.

    Returns:
        Seconds to the first sample of the answer, tokens of the prompt, and those found in the prefix cache.
    """
    async with connect(address, max_size=None) as socket:
        # Another one each time, or the prefix cache would have the prompt of an earlier question.
        settings = {
            "type": "realtime",
            "instructions": f"Answer question {seed}.",
            "max_output_tokens": ANSWER_TOKENS,
            "audio": {"input": {"turn_detection": None}},
        }
        await _send(socket, "session.update", session=settings)
        await _until(socket, "session.updated")
        if pcm is not None:
            await _speak(socket, pcm)
        asked = time.monotonic()
        if pcm is not None:
            await _send(socket, "input_audio_buffer.commit")
        else:
            await _send(socket, "conversation.item.create", item=TYPED)
        await _send(socket, "response.create")
        await _until(socket, "response.output_audio.delta")
        first_s = time.monotonic() - asked
        usage = (await _until(socket, "response.done"))["response"]["usage"]
    return first_s, usage["input_tokens"], usage["input_token_details"]["cached_tokens"]


async def _speak(socket: ClientConnection, pcm: bytes) -> None:
    size = round(PIECE_S * RATE) * 2
    begun = time.monotonic()
    for index, start in enumerate(range(0, len(pcm), size), 1):
        # A piece is there when its last sample is spoken.
        await asyncio.sleep(begun + index * PIECE_S - time.monotonic())
        piece = b64encode(pcm[start : start + size]).decode()
        await _send(socket, "input_audio_buffer.append", audio=piece)


async def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def _until(socket: ClientConnection, kind: str) -> dict[str, Any]:
    while True:
        event: dict[str, Any] = json.loads(await socket.recv())
        if event["type"] == "error":
            raise SystemExit(f"the gateway refused an event: {event['error']['message']}")
        if event["type"] == kind:
            return event


async def measure(
    model: Path, lengths: Sequence[float], repeats: int, loads: Sequence[int]
) -> AsyncIterator[Point]:
    """Type, and ask questions of each length, in each way and beside so many others."""
    for way in WAYS:
        async with served(model, way) as (address, listen):
            seeds = count()
            await ask(address, question(1.0, 99), next(seeds))
            for beside, seconds in product(loads, (0.0, *lengths)):
                tell(f"computed {way}, beside {beside}, {seconds:g} s")
                numbers = [next(seeds) for _ in range(repeats)]
                spoken = {seed: question(seconds, seed) if seconds else None for seed in numbers}
                async with answered(listen, beside):
                    asked = [await ask(address, pcm, seed) for seed, pcm in spoken.items()]
                first, prompt, cached = zip(*asked, strict=True)
                yield Point(
                    way=way,
                    beside=beside,
                    question_s=seconds,
                    first_audio_s=list(first),
                    prompt_tokens=list(prompt),
                    cached_tokens=list(cached),
                )


def table(points: Sequence[Point]) -> str:
    """The figures in Markdown."""
    lines = ["| prompt computed | beside | question | first sample after | prompt tokens | left at the end |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for each in points:
        left = statistics.median(
            tokens - cached for tokens, cached in zip(each.prompt_tokens, each.cached_tokens, strict=True)
        )
        first, tokens = statistics.median(each.first_audio_s), statistics.median(each.prompt_tokens)
        asked = f"{each.question_s:g} s" if each.question_s else "typed"
        cells = (each.way, each.beside, asked, f"{first:.2f} s", f"{tokens:.0f}", f"{left:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


async def main(options: argparse.Namespace) -> None:
    """Measure, print and write."""
    model = await ensure(options.size)
    points = [point async for point in measure(model, options.lengths, options.repeats, options.beside)]
    sys.stdout.write(table(points))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{options.size}-questions.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(points))
    )
    (options.out / f"{options.size}-questions.md").write_text(table(points), encoding="utf-8")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    each = argparse.ArgumentParser(prog="python -m benchmarks.questions", description=__doc__)
    each.add_argument("--size", choices=SIZES, default="small", help="checkpoint (default: small)")
    each.add_argument("--lengths", type=float, nargs="+", default=LENGTHS_S, metavar="S", help="of questions")
    each.add_argument("--repeats", type=int, default=5, help="questions of each length (default: 5)")
    each.add_argument("--beside", type=int, nargs="+", default=(0, 8), metavar="N", help="other clients")
    each.add_argument("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR")
    return each


if __name__ == "__main__":
    asyncio.run(main(parser().parse_args()))

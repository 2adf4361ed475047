"""A gateway that serves HTTP on a free port, imitated stages behind it, and OpenAI's client before it."""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any
from unittest import mock

import av
import httpx
import numpy as np
import openai
from numpy.typing import NDArray
from starlette.applications import Starlette

from gateway.access.access import Access
from gateway.fairness.uploads import UploadRoom
from gateway.http.app import make_app
from gateway.http.context import HttpContext
from shared.config import Config
from shared.messages import SAMPLE_RATE, ThinkRequest
from tests.gateway.bench import Bench, bench
from tests.support.ports import free_ports

MODEL = "checkpoint"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
Samples = NDArray[np.float32]
NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Whom clients believe that speak no TLS: authorities take long to read."""


def http_gateway(**changes: Any) -> dict[str, Any]:
    return {"http": f"tcp://127.0.0.1:{free_ports(1)[0]}", **changes}


@dataclass
class HttpBench(Bench):
    """A bench whose gateway serves HTTP."""

    ai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return str(self.http.base_url)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.http.base_url.port or 0

    async def post(self, **body: Any) -> httpx.Response:
        """A chat; what is not given has a value that is fine."""
        return await self.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI, **body})

    async def metric(self, line: str) -> float:
        """A sample of the gateway's own metrics."""
        text = (await self.http.get("/metrics")).text
        return next(float(each.split()[-1]) for each in text.splitlines() if each.startswith(line + " "))


@asynccontextmanager
async def http_bench(config: Config, **how: Any) -> AsyncIterator[HttpBench]:
    async with bench(config, **how) as b:
        url = (config.gateway.http or "").replace("tcp:", "http:")
        client = openai.AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=NOBODY),
            _strict_response_validation=True,
        )
        async with client, httpx.AsyncClient(base_url=url, timeout=60, verify=NOBODY) as http:
            yield HttpBench(b.config, b.process, b.stages, client, http)


async def speak(
    b: Bench, request: ThinkRequest, text: str, chunks: Sequence[Samples], pause_s: float = 0.0
) -> None:
    """Answer a request whole, with this text and this speech, and pauses between its chunks."""
    name = request.request_id
    if request.resume is None or request.resume.finish_reason is None:
        await b.stages.text(name, 0, b.encode(text), "stop")
    if request.speech is not None:
        await b.stages.codec(name, 0, [7] * 10, "stop")
        for seq, chunk in enumerate(chunks):
            await asyncio.sleep(pause_s if seq else 0)
            await b.stages.audio(name, seq, chunk.tobytes(), last=seq == len(chunks) - 1)


@asynccontextmanager
async def speaking(
    b: Bench, text: str, chunks: Sequence[Samples], pause_s: float = 0.0
) -> AsyncIterator[None]:
    """Answer every request so, inside the block."""

    async def loop() -> None:
        index = len(b.stages.requests)
        while True:
            await speak(b, await b.stages.request(index), text, chunks, pause_s)
            index += 1

    task = asyncio.create_task(loop())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def melody(seconds: float = 1.0) -> Samples:
    """A voice-like sound that is nowhere like itself, so that a shift shows."""
    time = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = 180 + 60 * np.sin(2 * np.pi * 0.7 * time) + 25 * np.sin(2 * np.pi * 5.3 * time)
    phase = 2 * np.pi * np.cumsum(pitch) / SAMPLE_RATE
    loud = 0.25 + 0.2 * np.sin(2 * np.pi * 3.1 * time)
    sound: Samples = (loud * (np.sin(phase) + 0.4 * np.sin(2 * phase))).astype(np.float32)
    return sound


def cut(samples: Samples, sizes: Iterable[int]) -> list[Samples]:
    return np.split(samples, np.cumsum(list(sizes)))


def decoded(data: bytes, form: str) -> Samples:
    """What a player makes of a file."""
    if form in {"pcm", "pcm16"}:
        return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32767)
    resampler = av.AudioResampler("fltp", "mono", SAMPLE_RATE)
    pieces = []
    with av.open(BytesIO(data), "r") as container:
        for frame in (*container.decode(audio=0), None):
            pieces += [part.to_ndarray()[0] for part in resampler.resample(frame)]
    return np.concatenate(pieces)


def likeness(heard: Samples, said: Samples) -> tuple[int, float]:
    """By how many samples a sound comes late, and the correlation of the two then."""
    size = 2 * max(heard.size, said.size)
    products = np.fft.irfft(np.fft.rfft(heard, size) * np.conj(np.fft.rfft(said, size)))
    shift = int(np.argmax(products[: size // 2]))
    both = min(heard.size - shift, said.size)
    return shift, float(np.corrcoef(heard[shift : shift + both], said[:both])[0, 1])


def events_in(text: str) -> list[Any]:
    """The objects of a stream of events."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def app_of(config: Config) -> Starlette:
    """An application with nothing behind it."""
    context = HttpContext(mock.Mock(), config, mock.Mock(), UploadRoom(1), Access(config), "m")
    return make_app(context)


def from_base64(pieces: Iterable[str]) -> bytes:
    """Join base64 both ways, which must not differ."""
    pieces = list(pieces)
    joined = base64.b64decode("".join(pieces), validate=True)
    assert joined == b"".join(base64.b64decode(piece, validate=True) for piece in pieces)
    return joined

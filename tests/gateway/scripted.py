"""An answer that stages give piece by piece, and gateways that begin requests anew where it stopped."""

import struct
from typing import Any

from omnirelay import AsyncClient, AudioEvent, DoneEvent, TextEvent
from omnirelay.client.answer import AsyncAnswer
from shared.config import Config
from shared.messages import StageName, ThinkRequest
from tests.gateway.bench import Bench, Configure
from tests.gateway.fake_stages import until

TEXT = "The quick brown fox jumps over the lazy dog"
CODES = list(range(100, 140))
CHUNKS = [struct.pack("<f", (index + 1) / 16) * (8 * 480) for index in range(5)]
"""Of 8 codec frames each."""


class Script:
    """What the whole answer is, and how much of it has been sent for each attempt."""

    def __init__(self, b: Bench) -> None:
        self.stages = b.stages
        self.text = b.encode(TEXT)
        self._seqs: dict[tuple[str, str], int] = {}
        self._told: dict[tuple[str, str], int] = {}

    async def play(
        self, request: ThinkRequest, text: float = 1.0, codes: float = 1.0, chunks: float = 1.0
    ) -> None:
        """Send what is missing of each stream up to a share of it."""
        resume = request.resume
        speech = resume.speech if resume is not None else None
        text_from = len(resume.text_token_ids) if resume is not None else 0
        if not (resume is not None and resume.finish_reason):
            await self._play(request, "text", self.text, text_from, text)
        if request.speech is None:
            return
        if not (speech is not None and speech.finish_reason):
            codes_from = len(speech.codec_token_ids) if speech is not None else 0
            await self._play(request, "codec", CODES, codes_from, codes)
        chunks_from = len(speech.chunk_samples) if speech is not None else 0
        await self._play(request, "audio", CHUNKS, chunks_from, chunks)

    async def _play(
        self, request: ThinkRequest, stream: str, pieces: list[Any], first: int, share: float
    ) -> None:
        key = request.request_id, stream
        last = round(share * len(pieces))
        for index in range(self._told.get(key, first), last):
            seq = self._seqs.get(key, 0)
            self._seqs[key] = seq + 1
            self._told[key] = index + 1
            ends = index == len(pieces) - 1
            if stream == "audio":
                await self.stages.audio(request.request_id, seq, pieces[index], last=ends)
            else:
                send = self.stages.text if stream == "text" else self.stages.codec
                await send(request.request_id, seq, [pieces[index]], "stop" if ends else None)


async def whole(answer: AsyncAnswer, script: Script, speech: bool = True) -> DoneEvent:
    """Take an answer, which must be that of the script: nothing twice and nothing missing."""
    events = [event async for event in answer]
    audio = [event for event in events if isinstance(event, AudioEvent)]
    texts = [event for event in events if isinstance(event, TextEvent)]
    done = events[-1]
    assert isinstance(done, DoneEvent)
    assert [token for event in texts for token in event.token_ids] == done.text_token_ids == script.text
    assert "".join(event.text for event in texts) == done.text == TEXT
    assert done.codec_token_ids == (CODES if speech else [])
    assert [event.seq for event in audio] == list(range(len(CHUNKS) if speech else 0))
    assert b"".join(event.samples.tobytes() for event in audio) == (b"".join(CHUNKS) if speech else b"")
    return done


SOON_S = 0.8
"""When silence counts, in tests that wait for it; in the others a slow machine must not look like it."""


RECOVERING = {"heartbeat_timeout_s": 10.0, "resume_attempts": 3, "resume_wait_s": 10.0}


def recovering(configure: Configure, limits: dict[str, Any] | None = None, **gateway: Any) -> Config:
    return configure(RECOVERING | gateway, **(limits or {}))


def is_lost(b: Bench, stage: StageName) -> bool:
    replica = b.registry.get(stage, "first")
    return replica is not None and replica.down


async def half_played(
    b: Bench, client: AsyncClient, **options: Any
) -> tuple[Script, AsyncAnswer, ThinkRequest]:
    """A request of which about the half of every stream is answered."""
    script = Script(b)
    answer = client.chat("Hi", **options)
    request = await b.stages.request(0)
    await script.play(request, 0.5, 0.5, 0.4)
    return script, answer, request


async def seen(b: Bench, script: Script, request: ThinkRequest, point: tuple[float, float, float]) -> None:
    """Wait until the gateway has taken what was sent up to a point."""
    active = b.process.gateway.dispatcher.of(request.request_id)
    assert active is not None
    record = active.record
    sizes = len(script.text), len(CODES), len(CHUNKS)
    lengths = [round(share * size) for share, size in zip(point, sizes, strict=True)]
    await until(
        lambda: [len(record.text.token_ids), len(record.codec.token_ids), record.audio.chunks] == lengths
    )

"""Token2wav's work: codec tokens in, audio chunks to the gateway while the talker still talks."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from prometheus_client.core import Metric
from vllm.platforms import current_platform

from omnirelay.errors import (
    OmniRelayError,
    RepeatedMessageError,
    SequenceError,
    StateTransitionError,
    UnknownSpeakerError,
)
from services.token2wav.chunks import AudioStream, SynthesisChunk
from services.token2wav.engine import build_token2wav
from services.token2wav.family import SynthesisFamily
from services.token2wav.pace import Pace
from shared.config import Token2WavConfig
from shared.engine_defaults import batch_size
from shared.messages import (
    SAMPLE_RATE,
    AudioChunk,
    CodecTokens,
    Sampling,
    SpeechSettings,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    SynthesisStart,
    Token2WavInput,
)
from shared.messages.payloads import Blob
from shared.metrics import counter
from shared.playback import PlaybackClock
from shared.stage.service import Failures, StageService
from shared.tracing.stage import StageTraces
from shared.transport.routing import Outlet
from shared.vllm.tensors import to_blob

GATEWAY_CHECK_S: Final = 0.05
"""How often a stream whose gateway does not keep up looks whether it does."""
_FIRST_BLOCKS: Final = 64
"""Blocks of all chunks at once up to which a GPU computes chunks of each size before the stage is ready."""
WAIT: Final = "wait_codes"
"""What a stream does, as its trace has it, while codec tokens for its next chunk are missing."""


@dataclass
class _Voice:
    """A request in work: its stream, and the numbers of the next messages in and out.

    Chunks that an earlier attempt delivered are not among them.
    """

    request_id: str
    priority: int
    stream: AudioStream
    clock: PlaybackClock
    streaming: bool
    resumed: bool
    suspect: bool  # Until its next chunk is delivered; see :attr:`shared.messages.Route.alone`
    cut_at: float = math.inf  # When the next chunk must be cut, by ``time.monotonic``
    measured: tuple[float, int] | None = None  # Submission and blocks of a typical chunk in the engine
    next_codes: int = 0
    next_audio: int = 0


class Token2WavService(StageService[Token2WavInput]):
    """Gives replies their sound; see :class:`shared.stage.service.StageService` for the protocol.

    A stream has one chunk in the engine at a time, named like its request.
    """

    name: StageName = "token2wav"

    def __init__(
        self, family: SynthesisFamily, model: Path, config: Token2WavConfig, gateway: Outlet[StageEvent]
    ) -> None:
        self.traces = StageTraces(self.name)
        self._gateway = gateway
        self._synthesis = config.synthesis
        batch = batch_size(config.engine, current_platform.is_cpu())
        self._engine = build_token2wav(family, model, config)
        self.model_time = self._engine.model_time
        self._pace = Pace(
            config.synthesis.look_ahead_blocks, self._engine.geometry.block_s, config.playback_margin_s
        )
        self._voices: dict[str, _Voice] = {}
        self._steps = 0
        self._chunks = 0
        self._samples = 0
        self.limits = StageLimits(speakers=sorted(family.voices(model)), batch=batch)
        if not current_platform.is_cpu():
            self.warm_up()

    def warm_up(self) -> None:
        """Compute chunks of each size, of one stream and of several, and forget them: :func:`first_steps`."""
        longest, ahead = self._synthesis.max_chunk_blocks, self._synthesis.look_ahead_blocks
        with self._engine.first_steps():
            for count in (1, 2, 4, 8, 16, 32):
                blocks = min(longest, _FIRST_BLOCKS // count - ahead)
                if blocks > 0 and count <= self.limits.batch:
                    self._play_at_once(count, blocks)

    def _play_at_once(self, count: int, longest: int) -> None:
        """Make streams audio in chunks of one block, of two, and so on up to the longest."""
        geometry, speaker = self._engine.geometry, self.limits.speakers[0]
        block, sampling = geometry.codes_per_block, Sampling(max_tokens=1)
        sizes = [blocks * block for blocks in range(1, longest + 1)]
        speech = SpeechSettings(speaker=speaker, sampling=sampling, seed=0, chunk_frames=sizes)
        streams = [AudioStream(speech, self._synthesis, geometry) for _ in range(count)]
        for stream in streams:
            # The last chunk has nothing behind it, so it is one more.
            stream.extend([0] * (sum(sizes) + block) * geometry.groups)
            stream.end()
        while not streams[0].finished:
            for number, chunk in enumerate([stream.next_chunk() for stream in streams]):
                if chunk is not None:
                    self._engine.submit_chunk(f"warm-up {number}", chunk)
            while self._engine.has_work:
                for outcome in self._engine.step():
                    if outcome.error is not None:
                        raise outcome.error
                    streams[int(outcome.request_id.split()[1])].accept_chunk()

    @property
    def ready(self) -> bool:
        """A step would compute something."""
        return self._engine.has_work or self.wake_at <= time.monotonic()

    @property
    def wake_at(self) -> float:
        """When the next chunk must be cut."""
        return min((voice.cut_at for voice in self._voices.values()), default=math.inf)

    def accept(self, message: Token2WavInput) -> None:
        """Take a message of the talker.

        Raises:
            SequenceError: It is not the next one of a request known here.
            InvalidRequestError: A codec token has no embedding, the stream is too long to be made in one
                piece, or it cannot be cut as asked, or as it is said to have been.
            UnknownSpeakerError: The checkpoint has no such voice.
        """
        if isinstance(message, SynthesisStart):
            self._start(message)
        else:
            self._take_codes(message)

    def abort(self, request_id: str) -> None:
        """Drop a request, if it is here."""
        if self._voices.pop(request_id, None) is not None:
            self._engine.abort([request_id])

    def take_turn(self) -> str | None:
        """Choose the stream whose chunk the next step advances alone; None if no suspect has one."""
        return self._engine.scheduler.take_turn()

    def step(self) -> dict[str, OmniRelayError]:
        """Advance all chunks by a solver step, send those that ended; gives the requests that failed."""
        failures = Failures()
        now = time.monotonic()
        for due in [each for each in self._voices.values() if each.cut_at <= now]:
            with failures.only(due.request_id):
                self._advance(due)
        outcomes = self._engine.step() if self._engine.has_work else []
        self._steps += 1
        for outcome in outcomes:
            voice = self._voices.get(outcome.request_id)
            if voice is None:
                continue
            with failures.only(voice.request_id):
                if outcome.error is not None:
                    raise outcome.error
                if outcome.waveform is not None:
                    if voice.measured is not None:
                        submitted, blocks = voice.measured
                        self._pace.observe(blocks, time.monotonic() - submitted)
                    if voice.stream.accept_chunk():
                        self._deliver(voice, outcome.waveform)
                    if not self._advance(voice):
                        self.traces.enter(voice.request_id, WAIT)
        return failures

    def load(self) -> StageLoad:
        """What the stage holds now."""
        running = self._engine.in_flight
        return StageLoad(running=running, waiting=len(self._voices) - running, steps=self._steps)

    def active_requests(self) -> list[str]:
        """The requests in work."""
        return list(self._voices)

    def collect(self) -> Iterator[Metric]:
        """What token2wav tells Prometheus besides what all stages do."""
        labels = {"stage": self.name}
        scheduler = self._engine.scheduler
        yield from scheduler.collect(self.name)
        yield counter(
            "omnirelay_solver_steps_total",
            "Solver steps of all chunks: nine a chunk with ten time points.",
            [(labels, scheduler.solver_steps)],
        )
        yield counter(
            "omnirelay_synthesis_chunks_total", "Chunks converted to audio.", [(labels, self._chunks)]
        )
        yield counter(
            "omnirelay_synthesis_audio_seconds_total",
            "Seconds of audio made.",
            [(labels, self._samples / SAMPLE_RATE)],
        )

    def _start(self, message: SynthesisStart) -> None:
        if message.request_id in self._voices:
            raise RepeatedMessageError(f"request {message.request_id} is in work already")
        self.traces.begin(message.request_id, message.traceparent, WAIT)
        speech, geometry = message.speech, self._engine.geometry
        if speech.speaker not in self.limits.speakers:
            raise UnknownSpeakerError(
                f"no voice {speech.speaker!r}, this checkpoint has {', '.join(self.limits.speakers)}"
            )
        delivered = geometry.codec_frames(message.chunk_samples)
        stream = AudioStream(speech, self._synthesis, geometry, delivered)
        clock, resumed = PlaybackClock(speech.streaming), bool(message.chunk_samples)
        suspect = message.route is not None and self.name in message.route.alone
        self._voices[message.request_id] = _Voice(
            message.request_id, message.priority, stream, clock, speech.streaming, resumed, suspect
        )

    def _take_codes(self, message: CodecTokens) -> None:
        voice = self._voices.get(message.request_id)
        if voice is None:
            raise SequenceError(f"codec tokens for request {message.request_id}, which is not known here")
        if message.seq < voice.next_codes:
            raise RepeatedMessageError(f"codec tokens number {message.seq} came twice")
        if message.seq > voice.next_codes:
            raise SequenceError(f"codec tokens number {message.seq}, expected number {voice.next_codes}")
        self._engine.geometry.check_codes(message.token_ids)
        try:
            voice.stream.extend(message.token_ids)
        except StateTransitionError as error:
            raise SequenceError(str(error)) from error
        voice.next_codes += 1
        if message.last:
            voice.stream.end()
        self._advance(voice)

    def _advance(self, voice: _Voice) -> bool:
        """Give the engine the stream's next chunk, or end a stream without one; tells if there was one."""
        if self._gateway.stalls(voice.request_id):
            voice.cut_at = time.monotonic() + GATEWAY_CHECK_S
            return False
        voice.cut_at = math.inf
        chunk = voice.stream.next_chunk(partial(self._pick, voice))
        if chunk is not None:
            self._submit(voice, chunk)
            self.traces.enter(voice.request_id, "chunk")
            return True
        if voice.stream.finished and voice.request_id in self._voices:
            if voice.resumed:
                self._complete(voice)
            else:
                self._send(voice, Blob(b""), 0)
        return False

    def _pick(self, voice: _Voice, sizes: Sequence[int], may_wait: bool) -> int:
        """Choose the blocks of the next chunk, or wait until its listener needs it."""
        blocks, voice.cut_at = self._pace.choose(sizes, may_wait, voice.clock.due, time.monotonic())
        return blocks

    def _submit(self, voice: _Voice, chunk: SynthesisChunk) -> None:
        now, due = time.monotonic(), voice.clock.due
        voice.measured = None
        if voice.streaming:
            blocks = -(-chunk.target_frames // self._engine.geometry.block_size)
            due -= self._pace.expected(blocks)
            # One that may be passed over for others takes longer, and a silent one less long.
            if not chunk.silent and self._pace.is_urgent(due, now):
                voice.measured = now, blocks
        self._engine.submit_chunk(voice.request_id, replace(chunk, due=due), voice.priority, voice.suspect)

    def _deliver(self, voice: _Voice, waveform: torch.Tensor) -> None:
        samples = waveform.numel()
        voice.suspect = False
        self._chunks += 1
        self._samples += samples
        voice.clock.made(samples / SAMPLE_RATE)
        self._send(voice, to_blob(waveform), samples)

    def _send(self, voice: _Voice, data: Blob, samples: int) -> None:
        last = voice.stream.finished
        self._gateway.put(
            AudioChunk(
                request_id=voice.request_id, seq=voice.next_audio, samples=samples, data=data, last=last
            )
        )
        voice.next_audio += 1
        if last:
            self._complete(voice)

    def _complete(self, voice: _Voice) -> None:
        del self._voices[voice.request_id]
        self.traces.completed(voice.request_id, {"omnirelay.chunks": voice.next_audio})

"""The token2wav service: codec ids in, chunks of audio out, one request's trouble its own."""

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from omnirelay.errors import (
    InvalidRequestError,
    OmniRelayError,
    RepeatedMessageError,
    SequenceError,
    StageFailedError,
    UnknownSpeakerError,
)
from services.families.qwen2_5_omni.token2wav.model import TOKEN2WAV
from services.token2wav.chunks import SynthesisChunk
from services.token2wav.engine import SynthesisEngine
from services.token2wav.service import Token2WavService
from shared.config import SynthesisConfig, SynthesisEngineConfig, Token2WavConfig
from shared.messages import AudioChunk, CodecTokens, StageEvent, SynthesisStart
from shared.messages.payloads import Blob
from shared.vllm.tensors import from_blob, to_blob
from tests.support.children import Patch
from tests.support.edges import Edge, MakeEdge
from tests.support.http import Change
from tests.support.thinking import Rig, fresh, speech_of
from tests.token2wav.support import Oracle, counting, pooler_of

TOLERANCE = 1e-4
SAMPLES_PER_CODE = 480


class Token2WavRig(Rig):
    """A token2wav service in the test's process, and all that came out of it."""

    def __init__(self, oracle: Oracle, make_edge: MakeEdge) -> None:
        self.oracle = oracle
        self._gateway: Edge[StageEvent] = make_edge(StageEvent)
        synthesis = SynthesisConfig(max_batch_frames=2000)
        config = Token2WavConfig(
            engine=SynthesisEngineConfig(max_num_seqs=8, gpu_memory_utilization=0.3), synthesis=synthesis
        )
        self.service = Token2WavService(TOKEN2WAV, oracle.path, config, self._gateway.push)
        self.engine = self.service._engine
        self.forget()

    def forget(self) -> None:
        assert self.service.active_requests() == []
        self.chunks: dict[str, list[AudioChunk]] = defaultdict(list)

    def start(
        self,
        name: str,
        *,
        seed: int = 1,
        speaker: str = "Ethan",
        streaming: bool = True,
        sizes: Sequence[int] = (),
        delivered: Sequence[int] = (),
    ) -> None:
        speech = speech_of(speaker, seed=seed, streaming=streaming, chunk_frames=sizes)
        samples = [frames * SAMPLES_PER_CODE for frames in delivered]
        self.service.accept(SynthesisStart(request_id=name, priority=0, speech=speech, chunk_samples=samples))

    def give(self, name: str, seq: int, codes: tuple[int, ...], *, last: bool = False) -> None:
        self.service.accept(CodecTokens(request_id=name, seq=seq, token_ids=list(codes), last=last))
        self.collect()

    def step(self) -> dict[str, OmniRelayError]:
        failures = self.service.step()
        self.collect()
        return failures

    def stream(
        self,
        name: str,
        codes: tuple[int, ...],
        piece: int,
        seed: int = 1,
        sizes: Sequence[int] = (12, 24, 48, 96),
    ) -> None:
        """Codes in pieces, with a step after each; cut as told, so that samples can be compared."""
        self.start(name, seed=seed, sizes=sizes)
        for seq, first in enumerate(range(0, len(codes), piece)):
            self.give(name, seq, codes[first : first + piece], last=first + piece >= len(codes))
            if self.service.ready:
                assert self.step() == {}
        self.settle()

    def collect(self) -> None:
        for event in self._gateway.take():
            assert isinstance(event, AudioChunk)
            chunks = self.chunks[event.request_id]
            assert event.seq == len(chunks)
            assert not any(chunk.last for chunk in chunks)
            chunks.append(event)

    def audio(self, name: str) -> torch.Tensor:
        """The whole waveform; it must be complete."""
        chunks = self.chunks[name]
        assert chunks[-1].last
        return torch.cat([from_blob(chunk.data, "float32", (chunk.samples,)) for chunk in chunks])

    def offline(self, codes: tuple[int, ...], seed: int, speaker: str = "Ethan") -> torch.Tensor:
        """transformers' waveform."""
        chunk = self.oracle.chunk(len(codes), codes=codes, seed=seed, speaker=speaker)
        return self.oracle.waveform(chunk)


@pytest.fixture(scope="session")
def _rig(oracle: Oracle, make_edge: MakeEdge) -> Token2WavRig:
    return Token2WavRig(oracle, make_edge)


@pytest.fixture
def rig(_rig: Token2WavRig) -> Iterator[Token2WavRig]:
    yield from fresh(_rig)


def test_offline_is_one_chunk_and_transformers_waveform(rig: Token2WavRig) -> None:
    codes = rig.oracle.codes(50, seed=1)
    rig.start("a", seed=7, speaker="Chelsie", streaming=False)
    rig.give("a", 0, codes[:30])
    assert not rig.service.ready
    rig.give("a", 1, codes[30:], last=True)
    rig.settle()
    assert [(chunk.samples, chunk.last) for chunk in rig.chunks["a"]] == [(50 * SAMPLES_PER_CODE, True)]
    assert (rig.audio("a") - rig.offline(codes, 7, "Chelsie")).abs().max() < TOLERANCE
    assert rig.service.active_requests() == []


@pytest.mark.parametrize(
    "sizes", [[1], [12], [13], [23], [12, 12], [12, 13], [12, 24, 14], [12, 24, 48, 47]], ids=str
)
def test_the_chunks_tile_the_stream(rig: Token2WavRig, sizes: list[int]) -> None:
    """One block (12 codes), two, four; the last chunk takes what no block of look-ahead follows."""
    length = sum(sizes)
    codes = rig.oracle.codes(length, seed=2)
    rig.stream("a", codes, piece=7)
    chunks = rig.chunks["a"]
    assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert [chunk.samples for chunk in chunks] == [size * SAMPLES_PER_CODE for size in sizes]
    assert rig.offline(codes, 1).numel() == length * SAMPLES_PER_CODE
    assert rig.audio("a").abs().max() <= 1


def test_when_codes_arrive_does_not_change_the_audio(rig: Token2WavRig) -> None:
    codes = rig.oracle.codes(70, seed=4)
    for piece in (1, 13, 70):
        rig.stream(f"p{piece}", codes, piece=piece, seed=5)
    for piece in (1, 13):
        assert [chunk.samples for chunk in rig.chunks[f"p{piece}"]] == [
            chunk.samples for chunk in rig.chunks["p70"]
        ]
        assert torch.equal(rig.audio(f"p{piece}"), rig.audio("p70"))


@pytest.mark.parametrize("sizes", [(12, 24, 48, 96), (36, 12, 24)])
def test_a_resumed_stream_brings_the_chunks_that_are_missing(
    rig: Token2WavRig, sizes: tuple[int, ...]
) -> None:
    """The very samples that the stream that was cut had, wherever that was."""
    codes = rig.oracle.codes(12 + 24 + 48 + 47, seed=16)
    rig.stream("a", codes, piece=131, sizes=sizes)
    samples = [chunk.samples for chunk in rig.chunks["a"]]
    for delivered in range(len(samples)):
        name = f"a.{delivered}"
        rig.start(name, sizes=sizes, delivered=[each // SAMPLES_PER_CODE for each in samples[:delivered]])
        rig.give(name, 0, codes[:30])
        rig.settle()
        rig.give(name, 1, codes[30:], last=True)
        rig.settle()
        assert [chunk.samples for chunk in rig.chunks[name]] == samples[delivered:]
        assert torch.equal(rig.audio(name), rig.audio("a")[-rig.audio(name).numel() :])
    assert rig.service.active_requests() == []


def test_a_stream_cut_at_its_deadlines_is_that_of_the_same_sizes(rig: Token2WavRig) -> None:
    """And so is one that is resumed at a border of it, and cut there as time wants it."""
    codes = rig.oracle.codes(140, seed=18)

    def sizes_of(name: str) -> list[int]:
        return [chunk.samples // SAMPLES_PER_CODE for chunk in rig.chunks[name]]

    rig.start("timed")
    for seq, first in enumerate(range(0, 140, 20)):
        rig.give("timed", seq, codes[first : first + 20], last=first == 120)
        rig.settle()
    cut = sizes_of("timed")
    assert sum(cut) == 140
    assert len(cut) > 2
    for delivered in (1, len(cut) - 1):
        name = f"timed.{delivered}"
        rig.start(name, delivered=cut[:delivered])
        rig.give(name, 0, codes, last=True)
        rig.settle()
        whole = [*cut[:delivered], *sizes_of(name)]
        assert sum(whole) == 140
        rig.stream(f"{name}-fixed", codes, piece=20, sizes=[max(12, each // 12 * 12) for each in whole])
        assert sizes_of(f"{name}-fixed") == whole
        assert torch.equal(rig.audio(name), rig.audio(f"{name}-fixed")[-rig.audio(name).numel() :])


def test_a_chunk_that_can_wait_is_cut_when_its_listener_needs_it(
    rig: Token2WavRig, monkeypatch: Patch
) -> None:
    """The service says when, and is ready then, without a message."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    codes = rig.oracle.codes(120, seed=19)
    # Nothing takes any time, so that soon nothing is expected to.
    for blocks in (1, 2) * 40:
        rig.service._pace.observe(blocks, 0.0)
    rig.start("a")
    rig.give("a", 0, codes[:24])
    rig.settle()
    # It has 0.24 s to play, less than the margin: the second block leaves as soon as it can.
    rig.give("a", 1, codes[24:48])
    rig.settle()
    assert [chunk.samples // SAMPLES_PER_CODE for chunk in rig.chunks["a"]] == [12, 24]
    rig.give("a", 2, codes[48:72])
    # 0.72 s from now all will have been heard.
    margin_s = Token2WavConfig().playback_margin_s
    assert rig.service.wake_at == pytest.approx(now + 0.72 - margin_s, abs=0.02)
    assert not rig.service.ready
    rig.give("a", 3, codes[72:84])
    now = rig.service.wake_at
    assert rig.service.ready
    rig.settle()
    # With every block that is there.
    assert [chunk.samples // SAMPLES_PER_CODE for chunk in rig.chunks["a"]] == [12, 24, 36]
    rig.give("a", 4, codes[84:107])
    assert now < rig.service.wake_at < math.inf
    # Nothing more will come.
    rig.give("a", 5, (), last=True)
    assert rig.service.ready
    rig.settle()
    assert [chunk.samples // SAMPLES_PER_CODE for chunk in rig.chunks["a"]] == [12, 24, 36, 35]
    assert rig.service.wake_at == math.inf


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("length", [0, 5, 36])
def test_of_a_stream_that_was_delivered_nothing_comes(
    rig: Token2WavRig, streaming: bool, length: int
) -> None:
    delivered = [12, 24] if streaming and length == 36 else [length]
    rig.start("a", streaming=streaming, delivered=delivered)
    rig.give("a", 0, rig.oracle.codes(length), last=True)
    assert not rig.service.ready
    assert rig.chunks["a"] == []
    assert rig.service.active_requests() == []


@pytest.mark.parametrize("streaming", [True, False])
def test_no_codes_are_one_empty_chunk(rig: Token2WavRig, streaming: bool) -> None:
    rig.start("a", streaming=streaming)
    rig.give("a", 0, (), last=True)
    assert [(chunk.samples, chunk.last) for chunk in rig.chunks["a"]] == [(0, True)]
    assert rig.service.active_requests() == []
    assert not rig.service.ready


def test_a_code_out_of_range_fails_only_its_request(rig: Token2WavRig) -> None:
    codes = rig.oracle.codes(50, seed=8)
    for name in ("bad", "good"):
        rig.start(name, seed=3, sizes=(12, 24, 48, 96))
        rig.give(name, 0, codes[:30])
    rig.step()
    with pytest.raises(InvalidRequestError, match="codec id 65"):
        rig.give("bad", 1, (65,))
    rig.service.abort("bad")
    rig.give("good", 1, codes[30:], last=True)
    rig.settle()
    rig.stream("alone", codes, piece=50, seed=3)
    assert (rig.audio("good") - rig.audio("alone")).abs().max() < TOLERANCE
    assert rig.chunks["bad"] == []


def test_messages_must_come_in_order(rig: Token2WavRig) -> None:
    codes = rig.oracle.codes(24, seed=9)
    with pytest.raises(SequenceError, match="request a, which is not known here"):
        rig.give("a", 0, codes)
    rig.start("a")
    with pytest.raises(RepeatedMessageError, match="a is in work already"):
        rig.start("a")
    with pytest.raises(SequenceError, match="number 1, expected number 0") as gap:
        rig.give("a", 1, codes)
    assert not isinstance(gap.value, RepeatedMessageError)
    rig.give("a", 0, codes[:12])
    with pytest.raises(RepeatedMessageError, match="number 0 came twice"):
        rig.give("a", 0, codes[:12])
    rig.give("a", 1, codes[12:], last=True)
    with pytest.raises(SequenceError, match="after the end"):
        rig.give("a", 2, codes)
    rig.settle()
    # What was refused left no trace.
    assert rig.audio("a").numel() == 24 * SAMPLES_PER_CODE
    assert (rig.audio("a") - rig.offline(codes, 1)).abs().max() < TOLERANCE


def test_an_unknown_voice_is_refused(rig: Token2WavRig) -> None:
    with pytest.raises(UnknownSpeakerError, match="Chelsie, Ethan"):
        rig.start("a", speaker="Nobody")
    assert rig.service.active_requests() == []


def test_abort_in_the_middle_frees_the_state_and_spares_the_others(rig: Token2WavRig) -> None:
    codes = rig.oracle.codes(24, seed=10)
    pooler = pooler_of(rig.engine)
    # One that is left alone would take all its steps at once.
    for name in ("dropped", "kept", "third"):
        rig.start(name)
        rig.give(name, 0, codes, last=True)
    rig.step()
    rig.step()
    assert pooler.active_states == 3
    assert (rig.service.load().running, rig.service.load().waiting) == (3, 0)
    rig.service.abort("dropped")
    rig.service.abort("unknown")
    assert rig.service.active_requests() == ["kept", "third"]
    assert rig.service.load().running == 2
    rig.step()
    gc.collect()
    assert pooler.active_states == 2
    rig.settle()
    assert pooler.active_states == 0
    assert rig.chunks.keys() == {"kept", "third"}
    assert (rig.audio("kept") - rig.offline(codes, 1)).abs().max() < TOLERANCE
    with pytest.raises(SequenceError, match="not known here"):
        rig.give("dropped", 1, codes)


def broken_chunk(rig: Token2WavRig, monkeypatch: Patch) -> type[OmniRelayError]:
    synthesizer = pooler_of(rig.engine).synthesizer
    prepare = synthesizer.prepare

    def break_one(chunk: object) -> object:
        if getattr(chunk, "seed", None) == 13:
            raise RuntimeError("broken on purpose")
        return prepare(chunk)

    monkeypatch.setattr(synthesizer, "prepare", break_one)
    return StageFailedError


def broken_waveform(_: Token2WavRig, monkeypatch: Patch) -> type[OmniRelayError]:
    def break_one(waveform: torch.Tensor) -> Blob:
        if waveform.numel() == 48 * SAMPLES_PER_CODE:
            raise TypeError("broken on purpose")
        return to_blob(waveform)

    monkeypatch.setattr("services.token2wav.service.to_blob", break_one)
    return OmniRelayError


@pytest.mark.parametrize("broken", [broken_chunk, broken_waveform])
def test_an_error_that_nobody_expected_fails_its_request_alone(
    rig: Token2WavRig, monkeypatch: Patch, broken: Callable[..., type[OmniRelayError]]
) -> None:
    error = broken(rig, monkeypatch)
    codes = {seed: rig.oracle.codes(24 if seed == 12 else 48, seed=seed) for seed in (12, 13)}
    for seed in (12, 13):
        rig.start(f"s{seed}", seed=seed, streaming=False)
        rig.give(f"s{seed}", 0, codes[seed], last=True)
    failures: dict[str, OmniRelayError] = {}
    while rig.service.ready:
        failures |= rig.step()
    assert failures.keys() == {"s13"}
    assert isinstance(failures["s13"], error)
    assert "broken on purpose" in str(failures["s13"])
    assert rig.service.holds("s13")
    rig.service.abort("s13")
    assert rig.chunks.keys() == {"s12"}
    assert (rig.audio("s12") - rig.offline(codes[12], 12)).abs().max() < TOLERANCE


def test_one_chunk_of_a_stream_is_in_the_engine_at_a_time(rig: Token2WavRig) -> None:
    codes = rig.oracle.codes(131, seed=14)
    with counting(rig.engine, "submit_chunk") as submitted:
        rig.start("a", sizes=(12, 24, 48, 96))
        rig.give("a", 0, codes, last=True)
        assert len(submitted) == 1
        while rig.service.ready:
            assert rig.step() == {}
            done = len(rig.chunks["a"])
            assert len(submitted) == min(done + 1, 4)
    assert len(rig.chunks["a"]) == 4


def test_chunks_steps_and_seconds_of_audio_are_told(rig: Token2WavRig) -> None:
    change = Change(rig.service.collect)
    codes = rig.oracle.codes(100)
    rig.stream("a", codes, 10)
    rig.start("alone", streaming=False)
    rig.give("alone", 0, codes[:50], last=True)
    rig.settle()
    chunks = len(rig.chunks["a"]) + 1
    assert chunks > 2
    ours = {"stage": "token2wav"}
    assert change("omnirelay_synthesis_chunks_total", **ours) == chunks
    assert change("omnirelay_synthesis_audio_seconds_total", **ours) == pytest.approx(150 / 50)
    assert change("omnirelay_solver_steps_total", **ours) == 9 * chunks
    # Alone, a chunk takes all its steps at once.
    assert change("omnirelay_stage_batch_requests_count", **ours) == chunks
    assert not [metric for metric in rig.service.collect() if "kv_cache" in metric.name]


def test_chunks_of_every_size_are_made_before_a_gpu_is_ready(rig: Token2WavRig, monkeypatch: Patch) -> None:
    submit, sizes = rig.engine.submit_chunk, defaultdict(set)

    def noted(name: str, chunk: SynthesisChunk, *rest: Any) -> None:
        submit(name, chunk, *rest)
        sizes[rig.engine.in_flight].add(chunk.target_frames // rig.engine.geometry.block_size)

    monkeypatch.setattr(rig.engine, "submit_chunk", noted)
    monkeypatch.setattr("services.token2wav.service._FIRST_BLOCKS", 8)
    monkeypatch.setattr(rig.service, "_synthesis", SynthesisConfig(max_chunk_blocks=4))
    change = Change(rig.service.collect)
    rig.service.warm_up()
    # Of one stream, and of several at once, that have at most 8 blocks with one of look-ahead each.
    assert [max(sizes[count], default=0) for count in (1, 2, 4, 8)] == [4, 3, 1, 0]
    assert sizes[1] == {1, 2, 3, 4}
    assert rig.service.active_requests() == []
    # Nothing was counted, nor its time measured.
    assert change("omnirelay_synthesis_chunks_total", stage="token2wav") == 0
    scheduler = rig.engine.scheduler
    assert scheduler.solver_steps == sum(scheduler.batch_sizes.counts) == rig.service.model_time.seconds == 0
    monkeypatch.undo()
    codes = rig.oracle.codes(100)
    rig.stream("a", codes, 10)
    rig.settle()
    assert rig.chunks["a"]


def test_vllm_keeps_its_metrics_only_where_they_can_be_asked_for(
    rig: Token2WavRig, engine: SynthesisEngine
) -> None:
    assert rig.engine._engine.logger_manager is not None
    # Built without a word on it.
    assert engine._engine.logger_manager is None


def test_the_batch_of_a_step_is_told(rig: Token2WavRig) -> None:
    change = Change(rig.service.collect)
    for name in "abc":
        rig.start(name, streaming=False)
        rig.give(name, 0, rig.oracle.codes(30), last=True)
    rig.settle()
    ours = {"stage": "token2wav"}
    assert change("omnirelay_stage_batch_requests_sum", **ours) == 3 * 9
    assert change("omnirelay_stage_batch_requests_bucket", **ours, le="2.0") == 0
    assert change("omnirelay_stage_batch_requests_bucket", **ours, le="4.0") == 9

"""What a run gives: every figure it measured, written as JSON."""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.measure.load import Load
from benchmarks.measure.machine import MachineFacts


class FirstAudio(msgspec.Struct, frozen=True, kw_only=True):
    """Times to first audio under one condition.

    Attributes:
        condition: In words.
        seconds: Each measurement.
    """

    condition: str
    seconds: list[float]


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """A message's way from one process to another; each list has one value for each message.

    Attributes:
        message: What it was.
        bytes: Its size.
        total_ms: From before it was encoded until after it was decoded.
        encode_ms: To encode it.
        decode_ms: To decode and check it.
        wire_ms: The rest: ZeroMQ, the kernel, and waking the receiver.
    """

    message: str
    bytes: int
    total_ms: list[float]
    encode_ms: list[float]
    decode_ms: list[float]
    wire_ms: list[float]


class Synthesis(msgspec.Struct, frozen=True, kw_only=True):
    """What token2wav needs for one stream.

    Attributes:
        audio_s: Length of the speech.
        seconds: To make it, each measurement.
        peak_memory: Largest resident set meanwhile, in bytes.
    """

    audio_s: float
    seconds: list[float]
    peak_memory: int


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding steps of one request; each list has one value for each step.

    Attributes:
        server: Whose: ``talker``, or bare ``vllm``.
        step_ms: How long the step took.
        model_ms: How much of it the model computed.
    """

    server: str
    step_ms: list[float]
    model_ms: list[float]

    @property
    def beside_ms(self) -> float:
        """Median of what is not the model's."""
        return percentile(
            [step - model for step, model in zip(self.step_ms, self.model_ms, strict=True)], 0.5
        )


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the servers gave equal answers.

    Attributes:
        compared: Answers of others that were held against transformers'.
        unequal: Those that differ, in words.
    """

    compared: int
    unequal: list[str]


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        checkpoint: Which size of the random checkpoint.
        parameters: Its parameters, in millions.
        machine: Where.
        reference_threads: Least seconds of transformers for an answer of a second, by threads; with the
            fastest number it was measured.
        loads: The loads.
        first_audio: Times to first audio, in pairs of conditions.
        hops: Messages between two processes.
        synthesis: Token2wav alone.
        agreement: Whether answers were equal.
        floor: Decoding steps of bare vLLM and of the talker.
    """

    checkpoint: str
    parameters: float
    machine: MachineFacts
    reference_threads: dict[int, float]
    loads: list[Load]
    first_audio: list[FirstAudio]
    hops: list[Hop]
    synthesis: list[Synthesis]
    agreement: Agreement
    floor: list[Floor] = []

    @property
    def threads(self) -> int | None:
        """Threads with which transformers was measured; none if it was not."""
        return min(self.reference_threads, key=self.reference_threads.__getitem__, default=None)


def write(result: RunResult, path: Path) -> None:
    """Write a run's figures as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def read(path: Path) -> RunResult:
    """Read what :func:`write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=RunResult)


def mean(values: Sequence[float]) -> float:
    """The mean; not a number without values."""
    return sum(values) / len(values) if values else math.nan


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed; not a number without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan

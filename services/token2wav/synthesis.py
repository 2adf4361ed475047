"""What goes into the token2wav engine and what comes out: one chunk of one audio stream.

A chunk rides in ``PoolingParams.extra_kwargs``; its result, or the error that ended it, comes back as
the engine's pooler output, which can only be one tensor, hence the packing at the end of this file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from omnirelay.errors import (
    CheckpointError,
    InvalidRequestError,
    OmniRelayError,
    StageFailedError,
    UnknownSpeakerError,
)
from shared.vllm.transfer import to_device

CHUNK_KEY: Final = "synthesis_chunk"
MAX_TIME_POINTS: Final = 257
"""Of a solver; more than the steps of any chunk."""

_WAVEFORM, _FAILURE = 0, 1
_HEADER_WORDS = 2
_RESTORABLE: Mapping[str, type[OmniRelayError]] = {
    error.code: error for error in (InvalidRequestError, UnknownSpeakerError, CheckpointError)
}


@dataclass(eq=False)
class StreamState:
    """What a stream's chunks, one after the other, leave for the next: the family's own, or None at first."""

    left: Any = None

    def __deepcopy__(self, memo: dict[int, object]) -> "StreamState":
        """Return itself: vLLM copies a request's parameters, and this is not a value but a place."""
        return self


@dataclass(frozen=True, eq=False)
class SynthesisChunk:
    """Everything needed to turn one window of codec ids into audio."""

    codes: tuple[int, ...]  # Of the window, target and look-ahead: frame by frame
    start: int  # Index in the stream of the window's first unit (:class:`CodecGeometry`), on a block border
    target_end: int  # Index in the stream after the target's last unit
    seed: int  # Of the stream's noise, unsigned 64-bit; equal for all chunks of a stream
    speaker: str
    time_points: int = 10  # At which a solver stops; its steps are one fewer
    guidance_scale: float = 0.5  # Of classifier-free guidance; below 1e-5 there is none (and half the work)
    sway_coefficient: float | None = -1.0  # Of sway sampling; None for evenly spaced time points
    stream: StreamState = field(default_factory=StreamState)  # What the chunk before left
    is_last: bool = False  # Whether the stream ends with this target
    silent: bool = False  # Whether it is wanted only for what it leaves: it is not made audio
    due: float = 0.0  # When work must begin to be in time, in seconds of ``time.monotonic``

    @property
    def target_frames(self) -> int:
        """Number of units of the target."""
        return self.target_end - self.start


def pack_waveform(waveform: torch.Tensor) -> torch.Tensor:
    """Put a chunk's samples, float32 [samples], behind a header that says what they are.

    The header's integers are stored as bits, for a float32 counts exactly only up to 2**24.
    """
    header = torch.tensor([_WAVEFORM, waveform.numel()], dtype=torch.int32)
    return torch.cat([to_device(header.view(torch.float32), waveform.device), waveform])


def pack_failure(error: OmniRelayError) -> torch.Tensor:
    """Put an error's code and message into one flat float32 tensor, as bits."""
    text = f"{error.code}\n{error}".encode()
    header = torch.tensor([_FAILURE, len(text)], dtype=torch.int32)
    padded = torch.frombuffer(bytearray(text.ljust(-(-len(text) // 4) * 4, b"\0")), dtype=torch.float32)
    return torch.cat([header.view(torch.float32), padded])


def unpack_waveform(packed: torch.Tensor) -> torch.Tensor:
    """Take a chunk's samples, float32 [samples], out of a pooler output.

    Raises the OmniRelayError packed in their place, or StageFailedError at something else.
    """
    if packed.ndim != 1 or packed.numel() < _HEADER_WORDS or packed.dtype != torch.float32:
        raise StageFailedError(f"token2wav returned {packed.dtype} {list(packed.shape)}, not samples")
    kind, size = packed[:_HEADER_WORDS].view(torch.int32).tolist()
    body = packed[_HEADER_WORDS:]
    if kind == _FAILURE:
        text = body.contiguous().view(torch.uint8)[:size].numpy().tobytes().decode()
        code, _, message = text.partition("\n")
        raise _RESTORABLE.get(code, StageFailedError)(message)
    if kind != _WAVEFORM or body.numel() != size:
        raise StageFailedError(f"token2wav returned {packed.numel()} values that are not {size} samples")
    return body

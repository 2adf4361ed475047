"""What goes into the token2wav engine and what comes out: one chunk of one audio stream.

A chunk rides in ``PoolingParams.extra_kwargs``; its result, or the error that ended it, comes back as
the engine's pooler output, which can only be one tensor, hence the packing at the end of this file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniDiTConfig

from omnirelay.errors import (
    CheckpointError,
    InvalidRequestError,
    OmniRelayError,
    StageFailedError,
    UnknownSpeakerError,
)
from services.token2wav.qwen2_5_omni.carry import StreamState

CHUNK_KEY: Final = "synthesis_chunk"
MAX_TIME_POINTS: Final = 257

_WAVEFORM, _FAILURE = 0, 1
_HEADER_WORDS = 2
_RESTORABLE: Mapping[str, type[OmniRelayError]] = {
    error.code: error for error in (InvalidRequestError, UnknownSpeakerError, CheckpointError)
}


@dataclass(frozen=True, eq=False)
class SynthesisChunk:
    """Everything needed to turn one window of codec ids into audio.

    Attributes:
        codes: codec ids of the window: target and look-ahead.
        start: index in the stream of the first mel frame of window and target; on a block border.
        target_end: index in the stream after the last such frame.
        seed: of the stream's noise, unsigned 64-bit; equal for all chunks of a stream.
        speaker: name of the voice.
        time_points: points in time at which the solver stops; its steps are one fewer.
        guidance_scale: of classifier-free guidance; below 1e-5 there is none (and half the work).
        sway_coefficient: of sway sampling, or None for evenly spaced time points.
        stream: what the chunk before left, and where this one leaves what the next will need.
        is_last: whether the stream ends with this target.
        silent: whether it is wanted only for what it leaves: it is not made audio.
        due: when its audio is wanted, in seconds of ``time.monotonic``.
    """

    codes: tuple[int, ...]
    start: int
    target_end: int
    seed: int
    speaker: str
    time_points: int = 10
    guidance_scale: float = 0.5
    sway_coefficient: float | None = -1.0
    stream: StreamState = field(default_factory=StreamState)
    is_last: bool = False
    silent: bool = False
    due: float = 0.0

    @property
    def steps(self) -> int:
        """Number of solver steps."""
        return self.time_points - 1

    @property
    def target_frames(self) -> int:
        """Number of mel frames of the target."""
        return self.target_end - self.start

    def tokens(self, max_vocoder_frames: int) -> int:
        """Number of tokens of this request: its solver steps, the last of which makes audio, and more audio.

        Args:
            max_vocoder_frames: mel frames that may become audio at one token.
        """
        return self.steps - 1 + self._pieces(max_vocoder_frames)

    def piece_frames(self, max_vocoder_frames: int) -> int:
        """Number of mel frames of the largest piece; its arguments are those of :meth:`tokens`."""
        if self.silent:
            return 0
        return -(-self.target_frames // self._pieces(max_vocoder_frames))

    def _pieces(self, max_vocoder_frames: int) -> int:
        return 1 if self.silent else -(-self.target_frames // max_vocoder_frames)

    def window_frames(self, repeats: int) -> int:
        """Number of mel frames in the window: those that the solver advances."""
        return len(self.codes) * repeats


def validate_codes(codes: Sequence[int], num_embeds: int) -> None:
    """Refuse codec ids that the DiT has no embedding for.

    Args:
        codes: codec ids.
        num_embeds: ``dit_config.num_embeds``; the table has one row more (reference:
            ``DiTCodecEmbedding``).

    Raises:
        InvalidRequestError: an id is out of range; the message names it and its place.
    """
    for position, code in enumerate(codes):
        if isinstance(code, bool) or not isinstance(code, int) or not 0 <= code <= num_embeds:
            raise InvalidRequestError(f"codes[{position}]: codec id {code!r} is not in 0..{num_embeds}")


def validate_chunk(chunk: SynthesisChunk, config: Qwen2_5OmniDiTConfig) -> None:
    """Refuse a chunk that the model would fail on, or worse, answer wrongly.

    Raises:
        InvalidRequestError: naming the field.
    """
    validate_codes(chunk.codes, config.num_embeds)
    _validate_window(chunk, config)
    if not 2 <= chunk.time_points <= MAX_TIME_POINTS:
        raise InvalidRequestError(f"time_points {chunk.time_points} is not in 2..{MAX_TIME_POINTS}")
    if not 0 <= chunk.seed < 2**64:
        raise InvalidRequestError(f"seed {chunk.seed} is not an unsigned 64-bit integer")
    for name in ("guidance_scale", "sway_coefficient", "due"):
        value = getattr(chunk, name)
        if value is not None and not math.isfinite(value):
            raise InvalidRequestError(f"{name} {value} is not finite")


def _validate_window(chunk: SynthesisChunk, config: Qwen2_5OmniDiTConfig) -> None:
    end = chunk.start + chunk.window_frames(config.repeats)
    if chunk.start < 0 or chunk.start % config.block_size:
        raise InvalidRequestError(f"start {chunk.start} is not on a block border")
    if not chunk.start < chunk.target_end <= end:
        raise InvalidRequestError(
            f"target {chunk.start}..{chunk.target_end} is empty or not within the window {chunk.start}..{end}"
        )
    if end - chunk.start > config.max_position_embeddings:
        raise InvalidRequestError(
            f"codes: a window of {end - chunk.start} mel frames exceeds the "
            f"{config.max_position_embeddings} of dit_config.max_position_embeddings"
        )
    if chunk.is_last and chunk.target_end != end:
        raise InvalidRequestError(f"target_end {chunk.target_end} is not the end {end} of the last window")
    if not chunk.is_last and chunk.target_end % config.block_size:
        raise InvalidRequestError(f"target_end {chunk.target_end} of a chunk before others cuts a block")


def pack_waveform(waveform: torch.Tensor) -> torch.Tensor:
    """Put a chunk's samples, float32 [samples], behind a header that says what they are.

    The header's integers are stored as bits, for a float32 counts exactly only up to 2**24.
    """
    header = torch.tensor([_WAVEFORM, waveform.numel()], dtype=torch.int32)
    return torch.cat([header.view(torch.float32).to(waveform.device), waveform])


def pack_failure(error: OmniRelayError) -> torch.Tensor:
    """Put an error's code and message into one flat float32 tensor, as bits."""
    text = f"{error.code}\n{error}".encode()
    header = torch.tensor([_FAILURE, len(text)], dtype=torch.int32)
    padded = torch.frombuffer(bytearray(text.ljust(-(-len(text) // 4) * 4, b"\0")), dtype=torch.float32)
    return torch.cat([header.view(torch.float32), padded])


def unpack_waveform(packed: torch.Tensor) -> torch.Tensor:
    """Take a chunk's samples, float32 [samples], out of a pooler output.

    Raises:
        OmniRelayError: the error that was packed in their place: an
            :class:`InvalidRequestError`, :class:`UnknownSpeakerError`, :class:`CheckpointError` or
            :class:`StageFailedError`.
        StageFailedError: the tensor is no pooler output of this engine.
    """
    if packed.ndim != 1 or packed.numel() < _HEADER_WORDS or packed.dtype != torch.float32:
        raise StageFailedError(f"token2wav returned {packed.dtype} {list(packed.shape)}, not samples")
    kind, size = packed[:_HEADER_WORDS].view(torch.int32).tolist()
    body = packed[_HEADER_WORDS:]
    if kind == _FAILURE:
        raise _restore(body, size)
    if kind != _WAVEFORM or body.numel() != size:
        raise StageFailedError(f"token2wav returned {packed.numel()} values that are not {size} samples")
    return body


def _restore(body: torch.Tensor, size: int) -> OmniRelayError:
    text = body.contiguous().view(torch.uint8)[:size].numpy().tobytes().decode()
    code, _, message = text.partition("\n")
    return _RESTORABLE.get(code, StageFailedError)(message)

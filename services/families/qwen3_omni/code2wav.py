"""Qwen3-Omni's code2wav as a vLLM pooling model: each chunk goes on where the one before it ended."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

from omnirelay.errors import CheckpointError
from services.families.qwen3_omni import UNIT_SAMPLES, frame_samples, trimmed_samples, voices
from services.families.qwen3_omni.vocoder import Stream, StreamedCode2Wav
from services.token2wav.chunks import CodecGeometry, SynthesisChunk
from services.token2wav.family import Cost, SynthesisFamily
from services.token2wav.model import SynthesisModel
from services.token2wav.scheduler import synthesis_of
from shared.config import SynthesisConfig


@dataclass(frozen=True)
class PieceWork:
    """See :class:`services.token2wav.family.Work`: an advance of a chunk makes a piece of it audio."""

    geometry: CodecGeometry
    config: SynthesisConfig

    def advances(self, chunk: SynthesisChunk) -> int:
        """As many pieces as the budget of a step asks for, of at least a frame."""
        return -(-chunk.target_frames // max(1, self.config.max_vocoder_frames // self._units))

    def cost(self, chunk: SynthesisChunk, done: int) -> Cost:
        """How long the next piece lasts."""
        return Cost(0, self._units * len(piece_of(chunk, done, self.advances(chunk))))

    @property
    def _units(self) -> int:
        """Units of a frame."""
        return max(1, self.geometry.unit_samples // UNIT_SAMPLES)


def piece_of(chunk: SynthesisChunk, number: int, pieces: int) -> range:
    """The frames, counted from the chunk's start, of one of so many pieces."""
    frames = chunk.target_frames
    return range(frames * number // pieces, frames * (number + 1) // pieces)


@dataclass(eq=False)
class ChunkState:
    """A chunk in work."""

    chunk: SynthesisChunk
    codes: torch.Tensor  # int64 ``[frames, groups]`` of the target
    stream: Stream
    audio: list[torch.Tensor] = field(default_factory=list)


class PieceSynthesizer:
    """See :class:`services.token2wav.family.Synthesizer`.

    On a CPU streams are computed one by one: ``together`` the last bits would depend on the neighbours.
    """

    def __init__(self, vocoder: StreamedCode2Wav, work: PieceWork, together: bool = False) -> None:
        self._vocoder = vocoder
        self._work = work
        self._together = together

    def prepare(self, chunk: SynthesisChunk) -> ChunkState:
        """Begin behind what the stream's last chunk has left, which stays as it is until this one ends."""
        left = chunk.stream.left or Stream()
        groups = self._work.geometry.groups
        codes = torch.tensor(chunk.codes[: chunk.target_frames * groups])
        device = self._vocoder.code2wav.code_offset.device
        return ChunkState(chunk, codes.view(-1, groups).to(device), Stream(left.frames, list(left.kept)))

    def advance(self, states: Sequence[ChunkState], advances: Sequence[range]) -> None:
        """Make pieces audio; those of equal length at once, if that is allowed."""
        alike: dict[tuple[int, bool, int], list[tuple[ChunkState, range]]] = defaultdict(list)
        for index, (state, taken) in enumerate(zip(states, advances, strict=True)):
            pieces = self._work.advances(state.chunk)
            frames = range(
                piece_of(state.chunk, taken.start, pieces).start,
                piece_of(state.chunk, taken.stop - 1, pieces).stop,
            )
            key = len(frames), bool(state.stream.kept), 0 if self._together else index
            alike[key].append((state, frames))
        for members in alike.values():
            codes = torch.stack([state.codes[frames.start : frames.stop] for state, frames in members])
            audio = self._vocoder([state.stream for state, _ in members], codes)
            for (state, _), own in zip(members, audio, strict=True):
                state.audio.append(own)

    def finished(self, state: ChunkState) -> torch.Tensor | None:
        """The chunk's samples after its last piece."""
        before = state.chunk.stream.left
        if state.stream.frames - (before.frames if before else 0) < state.chunk.target_frames:
            return None
        state.chunk.stream.left = state.stream
        return torch.cat(state.audio).float() if not state.chunk.silent else state.audio[0].new_empty(0)


WHOLE = "code2wav"
"""Where the nominal configuration of the engine, which vLLM reads, keeps the real one."""


def geometry_of(config: Any) -> CodecGeometry:
    """How codec ids and samples relate: a frame is a unit and a block; the first one is cut short."""
    whole: Qwen3OmniMoeCode2WavConfig = getattr(config, WHOLE)
    return CodecGeometry(
        block_size=1,
        repeats=1,
        max_frames=whole.max_position_embeddings,
        unit_samples=frame_samples(whole),
        trimmed_samples=trimmed_samples(whole),
        groups=whole.num_quantizers,
        ids=whole.codebook_size,
    )


class Code2WavForSynthesis(SynthesisModel):
    """The vocoder, in float32 as the other families'."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"thinker.": None, "talker.": None, "code2wav.": "vocoder.code2wav."}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_config
        if not isinstance(getattr(config, WHOLE, None), Qwen3OmniMoeCode2WavConfig):
            raise CheckpointError(f"expected a code2wav configuration, got {type(config).__name__}")
        self.vocoder = StreamedCode2Wav(getattr(config, WHOLE)).float()
        work = PieceWork(geometry_of(config), synthesis_of(vllm_config.additional_config))
        self.synthesize_with(PieceSynthesizer(self.vocoder, work, not current_platform.is_cpu()))


def code2wav_config(config: Any) -> Any:
    """A copy of code2wav's part of a whole model's configuration, which may be changed for vLLM."""
    whole = getattr(config, "code2wav_config", None)
    if whole is None:
        return config if hasattr(config, WHOLE) else None
    nominal = copy.deepcopy(whole)
    setattr(nominal, WHOLE, whole)
    return nominal


TOKEN2WAV: Final = SynthesisFamily(
    model=Code2WavForSynthesis,
    config=code2wav_config,
    work=lambda config, synthesis: PieceWork(geometry_of(config), synthesis),
    voices=voices,
)

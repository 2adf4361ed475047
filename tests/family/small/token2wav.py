"""The vocoder of the small family: one causal pass over the frames of a chunk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from omnirelay.errors import UnknownSpeakerError
from services.token2wav.chunks import CodecGeometry
from services.token2wav.family import Budget, Cost, SynthesisFamily
from services.token2wav.model import SynthesisModel
from services.token2wav.synthesis import SynthesisChunk
from tests.family.small.config import (
    BLOCK_FRAMES,
    CODE_DIM,
    CODES,
    SAMPLES_PER_FRAME,
    VOICES,
    SmallOmniConfig,
    SmallVocoderConfig,
)

GEOMETRY: Final = CodecGeometry(
    block_size=BLOCK_FRAMES, repeats=1, max_frames=400, unit_samples=SAMPLES_PER_FRAME, groups=2, ids=CODES
)


class Vocoder(nn.Module):
    """A frame's samples depend on it and on the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(CODES, CODE_DIM)
        self.second = nn.Embedding(CODES, CODE_DIM)
        self.voice = nn.Embedding(len(VOICES), CODE_DIM)
        self.wave = nn.Linear(2 * CODE_DIM, SAMPLES_PER_FRAME)

    def embed(self, codes: torch.Tensor, voice: torch.Tensor) -> torch.Tensor:
        """Frames ``[n, 2]`` as ``[n, dim]``."""
        embeds: torch.Tensor = self.first(codes[:, 0]) + self.second(codes[:, 1]) + self.voice(voice)
        return embeds

    def forward(self, before: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        """Samples of embedded frames, behind one that may be zero."""
        pairs = torch.cat([torch.cat([before, frames[:-1]]), frames], dim=-1)
        return torch.tanh(self.wave(pairs)).flatten()


@dataclass
class Progress:
    """A chunk in work."""

    chunk: SynthesisChunk
    frames: torch.Tensor
    samples: torch.Tensor | None = None


class OnePass:
    """See :class:`services.token2wav.family.Synthesizer`."""

    def __init__(self, vocoder: Vocoder) -> None:
        self._vocoder = vocoder

    def prepare(self, chunk: SynthesisChunk) -> Progress:
        if chunk.speaker not in VOICES:
            raise UnknownSpeakerError(f"no voice {chunk.speaker!r}")
        codes = torch.tensor(chunk.codes).view(-1, 2)[: chunk.target_frames]
        return Progress(chunk, self._vocoder.embed(codes, torch.tensor(list(VOICES).index(chunk.speaker))))

    def advance(self, states: Sequence[Progress], advances: Sequence[range]) -> None:
        assert all(taken == range(1) for taken in advances)
        for state in states:
            stream = state.chunk.stream
            before = torch.zeros(1, CODE_DIM) if stream.left is None else stream.left
            state.samples = self._vocoder(before, state.frames)
            stream.left = state.frames[-1:]

    def finished(self, state: Progress) -> torch.Tensor | None:
        return torch.empty(0) if state.chunk.silent else state.samples


@dataclass(frozen=True)
class OneAdvance:
    """See :class:`services.token2wav.family.Work`."""

    def advances(self, _: SynthesisChunk) -> int:
        return 1

    def cost(self, chunk: SynthesisChunk, done: int) -> Cost:
        assert done == 0
        return Cost(solver=0, vocoder=0 if chunk.silent else chunk.target_frames)

    def check(self, chunk: SynthesisChunk) -> None:
        assert 0 <= chunk.start < chunk.target_end


class SmallVocoder(SynthesisModel):
    """The vocoder as vLLM has it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.vocoder = Vocoder()
        self.synthesize_with(OnePass(self.vocoder))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        mapper = WeightsMapper(orig_to_new_prefix={"thinker.": None, "talker.": None})
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=mapper)
        return loaded


def vocoder_config(config: Any) -> SmallVocoderConfig | None:
    if isinstance(config, SmallOmniConfig):
        return SmallVocoderConfig(dtype="float32")
    return config if isinstance(config, SmallVocoderConfig) else None


def work(_: Any, __: Budget) -> OneAdvance:
    return OneAdvance()


TOKEN2WAV: Final = SynthesisFamily(
    architecture="SmallVocoder",
    model=SmallVocoder,
    config=vocoder_config,
    geometry=lambda _: GEOMETRY,
    work=work,
    voices=lambda _: list(VOICES),
)

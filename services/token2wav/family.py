"""What a model family gives token2wav."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from services.token2wav.chunks import CodecGeometry, SynthesisChunk
from shared.config import SynthesisConfig


class Cost(NamedTuple):
    """What an advance of a chunk takes: units that a solver advances, if any, and units that become audio."""

    solver: int
    vocoder: int


Budget = Cost
"""What one step of the engine may take; a chunk that takes more is advanced alone."""


class Work(Protocol):
    """What chunks take, known without the model: the scheduler asks it."""

    @property
    def geometry(self) -> CodecGeometry:
        """How codec frames, units, blocks and samples relate."""

    def advances(self, chunk: SynthesisChunk) -> int:
        """How often a chunk has to be advanced until it is audio, at most the engine's positions."""

    def cost(self, chunk: SynthesisChunk, done: int) -> Cost:
        """What the next advance takes, where so many are done."""


class Synthesizer(Protocol):
    """Makes audio of chunks, many at a time.

    An error of :meth:`prepare` or :meth:`finished` ends one chunk, one of :meth:`advance` the engine.
    """

    def prepare(self, chunk: SynthesisChunk) -> Any:
        """Begin with a chunk; gives its state for as long as it is in work, or raises OmniRelayError."""

    def advance(self, states: Sequence[Any], advances: Sequence[range]) -> None:
        """Advance chunks by their states; each takes those of its :meth:`Work.advances` that are given."""

    def finished(self, state: Any) -> torch.Tensor | None:
        """Samples float32 ``[samples]`` of a chunk just advanced, none if silent; None if unfinished."""


@dataclass(frozen=True)
class SynthesisFamily:
    """A family's token2wav.

    ``config`` narrows a whole model's Hugging Face configuration to token2wav's; none where it is not the
    family's.  vLLM calls it on its own result again, and on an empty configuration.
    """

    model: type[nn.Module]  # A :class:`services.token2wav.model.SynthesisModel`
    config: Callable[[Any], Any]
    work: Callable[[Any, SynthesisConfig], Work]  # By the narrowed configuration and the stage's
    voices: Callable[[Path], Sequence[str]]  # Names, of the checkpoint in a directory

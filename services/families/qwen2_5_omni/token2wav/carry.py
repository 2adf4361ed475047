"""What a chunk leaves to the next one of its stream, so that nothing before it is computed again.

A frame of the DiT sees the block before its own, in the layers that look back, and nothing further.  So
all that a chunk's first block needs of the past are the keys and values that the last block before it
had, in those layers, at every evaluation of the network: the solver evaluates it at the same times for
every chunk of a stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.families.qwen2_5_omni.token2wav.ode import EVALUATIONS_PER_STEP
from services.token2wav.synthesis import StreamState


@dataclass(eq=False)
class StreamPast:
    """What the chunks of a stream so far leave.

    Attributes:
        mel: log-mel frames made audio last, float32 [frames, mel_dim]; None where there are none.
        attention: keys and values of the last block made audio, float32
            [evaluations, layers that look back, 2, branches, heads, block_size, head_dim]; None where
            they are not known.
        overlap: samples behind those made audio last, which the next chunk makes again from a better
            spectrogram, float32 [samples]; None where no chunk follows or audio was not wanted.
    """

    mel: torch.Tensor | None = None
    attention: torch.Tensor | None = None
    overlap: torch.Tensor | None = None


def past_of(stream: StreamState) -> StreamPast:
    """What a stream's chunks left; made with the first of them."""
    if not isinstance(stream.left, StreamPast):
        stream.left = StreamPast()
    return stream.left


@dataclass(frozen=True, eq=False)
class CarriedChunk:
    """How one chunk of a batch takes over and leaves keys and values."""

    past: torch.Tensor  # The ``attention`` of :class:`StreamPast`
    request: int  # The chunk's number in the batch
    continues: bool  # Whether ``past`` holds what the chunk before left
    leaves: bool  # Whether a chunk follows

    def at(self, evaluations: Sequence[int]) -> torch.Tensor:
        """What is held for the evaluations of a step, of which each request's first is given."""
        first = evaluations[self.request]
        return self.past[first : first + EVALUATIONS_PER_STEP]


@dataclass(frozen=True, eq=False)
class Carry:
    """Keys and values that the chunks of a batch take over and leave; in the order of the batch.

    ``filler`` is of the same shape: of so many further rows as the batch takes over, or of none.
    """

    chunks: Sequence[CarriedChunk]
    filler: torch.Tensor

    def take(self, evaluations: Sequence[int]) -> torch.Tensor:
        """What those chunks that continue take over in a step of the solver.

        Returns float32 [evaluations, layers that look back, 2, continued rows, heads, block_size, head_dim].
        """
        return torch.cat(
            [chunk.at(evaluations) for chunk in self.chunks if chunk.continues] + [self.filler], dim=3
        )

    def leave(self, evaluations: Sequence[int], left: torch.Tensor) -> None:
        """Keep what a step leaves, so shaped with the rows left, where what it took over was."""
        row = 0
        for place in (chunk.at(evaluations) for chunk in self.chunks if chunk.leaves):
            place.copy_(left[:, :, :, row : row + place.shape[3]])
            row += place.shape[3]

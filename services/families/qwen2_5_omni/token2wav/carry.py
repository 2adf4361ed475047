"""What a chunk leaves to the next one of its stream, so that nothing before it is computed again.

A frame of the DiT sees the block before its own, in the layers that look back, and nothing further.  So
all that a chunk's first block needs of the past are the keys and values that the last block before it
had, in those layers, at every evaluation of the network: the solver evaluates it at the same times for
every chunk of a stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

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
    """Where in a batch one chunk takes over and leaves keys and values."""

    past: torch.Tensor  # The ``attention`` of :class:`StreamPast`
    request: int  # The chunk's number in the batch
    continues: bool  # Whether ``past`` holds what the chunk before left
    last_rows: torch.Tensor | None  # Of the target's last block, int64 [branches]; None if no chunk follows


@dataclass(frozen=True, eq=False)
class Carry:
    """Keys and values that the chunks of a batch take over and leave; in the order of the batch."""

    chunks: Sequence[CarriedChunk]

    def take(self, layer: int, evaluations: Sequence[int]) -> Sequence[torch.Tensor | None]:
        """Look up the blocks before those chunks that continue, in a layer among those that look back.

        Returns keys and values, float32 [branches of these, heads, block_size, head_dim] each, or None.
        """
        taken = [chunk.past[evaluations[chunk.request], layer] for chunk in self.chunks if chunk.continues]
        return torch.cat(taken, dim=1).unbind() if taken else (None, None)

    def leave(self, layer: int, evaluations: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep keys and values [rows, heads, block_size, head_dim] in the place of those looked up."""
        for chunk in self.chunks:
            if chunk.last_rows is not None:
                place = chunk.past[evaluations[chunk.request], layer]
                place[0], place[1] = key[chunk.last_rows], value[chunk.last_rows]

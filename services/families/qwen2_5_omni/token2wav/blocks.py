"""How sequences of different lengths share one batch: as rows of attention blocks.

The DiT attends within a block of mel frames and, in some layers, to the block before or after it.  So
a batch is a list of blocks, [rows, block_size, ...], whatever sequence each belongs to: only the
last block of a sequence is padded, cost is linear in length, and no mask over a sequence is needed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from omnirelay.errors import ConfigError
from shared.vllm.transfer import all_to_device


def to_blocks(frames: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cut frames [frames, channels] into [blocks, block_size, channels], the last block padded with zeros."""
    blocks = -(-frames.shape[0] // block_size)
    padded = functional.pad(frames, (0, 0, 0, blocks * block_size - frames.shape[0]))
    return padded.view(blocks, block_size, frames.shape[1])


@dataclass
class BlockLayout:
    """Which block is whose, and who its neighbours are.

    A *source* row is a block of a request; guidance needs two sequences of some requests, so a *row*
    of the network's input is a block of a branch of a request.  All conditioned rows come first, in the
    order of the source rows; then the unconditioned ones.
    """

    source: torch.Tensor  # Source row of each row, int64 [rows]
    request: torch.Tensor  # Request of each row, int64 [rows]
    guided: torch.Tensor  # Source rows that have an unconditioned row, in the order of those, int64 [guided]
    previous: torch.Tensor  # Row of the block before in the same sequence, int64 [rows]; itself without one
    following: torch.Tensor  # Row of the block after; itself without one
    has_previous: torch.Tensor  # bool [rows]
    has_following: torch.Tensor  # bool [rows]
    first_rows: Sequence[torch.Tensor]  # First of each request's branches, int64 [branches] each, on the CPU
    continued: torch.Tensor  # Those of them with a block before that is not in the batch, int64 [continued]
    valid: torch.Tensor  # Whether each frame is one, and not padding; bool [rows, block_size]
    padded: bool  # Whether any frame is padding
    _masks: dict[tuple[bool, bool], torch.Tensor | None] = field(default_factory=dict)

    @property
    def source_rows(self) -> int:
        """Number of source rows."""
        return self.source.shape[0] - self.guided.shape[0]

    @property
    def source_request(self) -> torch.Tensor:
        """Request of each source row, int64 [source rows]."""
        return self.request[: self.source_rows]

    def with_neighbours(
        self, states: torch.Tensor, backward: bool, ahead: bool, past: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Put wanted neighbours beside each block: ``[rows, heads, block_size * (1 to 3), head_dim]``.

        Args:
            states: [rows, heads, block_size, head_dim].
            backward: whether the block before is wanted.
            ahead: whether the block after is wanted.
            past: the blocks before the ``continued`` ones, [continued, heads, block_size, head_dim].
        """
        parts = [states]
        if backward:
            before = states[self.previous]
            if past is not None:
                before[self.continued] = past
            parts.insert(0, before)
        if ahead:
            parts.append(states[self.following])
        return torch.cat(parts, dim=2) if len(parts) > 1 else states

    def key_mask(self, backward: bool, ahead: bool) -> torch.Tensor | None:
        """Which of the keys of :meth:`with_neighbours` exist, bool [rows, 1, 1, keys]; None for all."""
        reach = (backward, ahead)
        if reach not in self._masks:
            self._masks[reach] = self._build_mask(backward, ahead)
        return self._masks[reach]

    def _build_mask(self, backward: bool, ahead: bool) -> torch.Tensor | None:
        if not (self.padded or backward or ahead):
            return None
        parts = [self.valid]
        if backward:
            before = self.valid[self.previous] & self.has_previous[:, None]
            before[self.continued] = True
            parts.insert(0, before)
        if ahead:
            parts.append(self.valid[self.following] & self.has_following[:, None])
        return torch.cat(parts, dim=1)[:, None, None, :]


def build_layout(
    frames: Sequence[int],
    guided: Sequence[bool],
    block_size: int,
    device: torch.device,
    continued: Sequence[bool] = (),
) -> BlockLayout:
    """Lay out the sequences of a batch; raises ConfigError if one has no frames, or there is none.

    Args:
        frames: length of each request's sequence.
        guided: whether each request has an unconditioned branch besides the conditioned one.
        block_size: frames in a block.
        device: where the tensors of the layout go.
        continued: whether a block that is not in the batch stands before each request's first one.
    """
    if not frames or min(frames) < 1:
        raise ConfigError(f"a batch needs requests with at least one frame each, got {list(frames)}")
    blocks = torch.tensor([-(-length // block_size) for length in frames])
    requests = torch.arange(len(frames))
    first_source = torch.cumsum(blocks, 0) - blocks
    branches = torch.cat([requests, requests[torch.tensor(guided, dtype=torch.bool)]])
    lengths = blocks[branches]
    request = torch.repeat_interleave(branches, lengths)
    branch_starts = torch.cumsum(lengths, 0) - lengths
    first_rows = [branch_starts[branches == index] for index in range(len(frames))]
    starts = torch.repeat_interleave(branch_starts, lengths)
    rows = torch.arange(int(lengths.sum()))
    within = rows - starts
    source = first_source[request] + within
    has_following = within + 1 < blocks[request]
    remaining = torch.tensor(frames)[request] - within * block_size
    valid = torch.arange(block_size)[None, :] < remaining[:, None]
    tensors = {
        "source": source,
        "request": request,
        "guided": source[int(blocks.sum()) :],
        "previous": torch.where(within > 0, rows - 1, rows),
        "following": torch.where(has_following, rows + 1, rows),
        "has_previous": within > 0,
        "has_following": has_following,
        "continued": torch.cat([rows[:0], *itertools.compress(first_rows, continued)]),
        "valid": valid,
    }
    there: dict[str, Any] = dict(zip(tensors, all_to_device(list(tensors.values()), device), strict=True))
    return BlockLayout(**there, first_rows=first_rows, padded=not bool(valid.all()))

"""How sequences of different lengths share one batch: as rows of attention blocks.

The DiT attends within a block of mel frames and, in some layers, to the block before or after it.  So
a batch is a list of blocks, [rows, block_size, ...], whatever sequence each belongs to: only the
last block of a sequence is padded, cost is linear in length, and no mask over a sequence is needed.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.nn import functional

from omnirelay.errors import ConfigError
from shared.vllm.transfer import all_to_device

MOST_FILLED: Final = 64
"""Source rows up to which :func:`build_layout` fills batches: what is larger keeps a GPU busy anyway."""


def to_blocks(frames: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cut frames [frames, channels] into [blocks, block_size, channels], the last block padded with zeros."""
    blocks = -(-frames.shape[0] // block_size)
    padded = functional.pad(frames, (0, 0, 0, blocks * block_size - frames.shape[0]))
    return padded.view(blocks, block_size, frames.shape[1])


class BlockLayout(NamedTuple):
    """Which block is whose, and who its neighbours are.

    A *source* row is a block of a request; guidance needs two sequences of each, so a *row* of the network's
    input is a block of a branch of a request.  All conditioned rows come first, in the order of the source
    rows; then the unconditioned ones, in the same order.
    """

    source: torch.Tensor  # Source row of each row, int64 [rows]
    request: torch.Tensor  # Request of each row, int64 [rows]
    previous: torch.Tensor  # Row of the block before in the same sequence, int64 [rows]; itself without one
    following: torch.Tensor  # Row of the block after; itself without one
    continued: torch.Tensor  # Rows with a block before that is not in the batch, int64 [continued]
    leaving: torch.Tensor  # Rows whose keys and values later chunks take over, int64 [leaving]
    mask: (
        torch.Tensor
    )  # Which keys exist in the block before, its own, the one after; bool [rows, 1, 1, keys]
    own_mask: torch.Tensor | None  # The same of its own alone; None where all exist

    def with_neighbours(self, states: torch.Tensor, past: torch.Tensor | None, ahead: bool) -> torch.Tensor:
        """Put wanted neighbours beside each block: ``[rows, heads, block_size * (1 to 3), head_dim]``.

        Args:
            states: [rows, heads, block_size, head_dim].
            past: the blocks before the ``continued`` ones, [continued, heads, block_size, head_dim]; None if
                the block before is not wanted.
            ahead: whether the block after is wanted.
        """
        parts = [states]
        if past is not None:
            parts.insert(0, states[self.previous].index_copy_(0, self.continued, past))
        if ahead:
            parts.append(states[self.following])
        return torch.cat(parts, dim=2) if len(parts) > 1 else states

    def key_mask(self, backward: bool, ahead: bool) -> torch.Tensor | None:
        """Which of the keys of :meth:`with_neighbours` exist, bool [rows, 1, 1, keys]; None for all."""
        if not (backward or ahead):
            return self.own_mask
        block = self.mask.shape[-1] // 3
        return self.mask[..., 0 if backward else block : 3 * block if ahead else 2 * block]


def build_layout(
    frames: Sequence[int],
    guided: bool,
    block_size: int,
    device: torch.device,
    continued: Sequence[bool] = (),
    left: Sequence[int | None] = (),
    filled: bool = False,
) -> BlockLayout:
    """Lay out the sequences of a batch; raises ConfigError if one has no frames, or there is none.

    Args:
        frames: length of each request's sequence.
        guided: whether there is an unconditioned branch besides the conditioned one.
        block_size: frames in a block.
        device: where the tensors of the layout go.
        continued: whether a block that is not in the batch stands before each request's first one.
        left: number of the block of each request that later chunks take over from; None for none.
        filled: whether a further request fills the rows up to one of few sizes; ``continued`` and ``leaving``
            are then filled up by a row of it.
    """
    if not frames or min(frames) < 1:
        raise ConfigError(f"a batch needs requests with at least one frame each, got {list(frames)}")
    counts = [-(-length // block_size) for length in frames]
    dummy = sum(counts)
    if filled:
        counts.append(filled_size(dummy) - dummy)
        frames = [*frames, counts[-1] * block_size]
    blocks = torch.tensor(counts)
    requests = torch.arange(len(frames))
    first_source = torch.cumsum(blocks, 0) - blocks
    branches = requests.repeat(1 + guided)
    lengths = blocks[branches]
    request = torch.repeat_interleave(branches, lengths)
    branch_starts = torch.cumsum(lengths, 0) - lengths
    first_rows = [branch_starts[branches == index] for index in range(len(frames))]
    starts = torch.repeat_interleave(branch_starts, lengths)
    rows = torch.arange(int(lengths.sum()))
    within = rows - starts
    source = first_source[request] + within
    has_following = within + 1 < blocks[request]
    previous = torch.where(within > 0, rows - 1, rows)
    following = torch.where(has_following, rows + 1, rows)
    valid = torch.arange(block_size)[None, :] < (torch.tensor(frames)[request] - within * block_size)[:, None]
    taking = torch.cat([rows[:0], *itertools.compress(first_rows, continued)])
    leaving = torch.cat(
        [rows[:0], *(first + at for first, at in zip(first_rows, left, strict=False) if at is not None)]
    )
    before = valid[previous] & (within > 0)[:, None]
    before[taking] = True
    mask = torch.cat([before, valid, valid[following] & has_following[:, None]], dim=1)[:, None, None, :]
    if filled:
        # A power of two, so that there are few pairs of sizes.
        size = 1 << (max(taking.numel(), leaving.numel(), 4) - 1).bit_length()
        taking, leaving = (
            functional.pad(each, (0, size - each.numel()), value=dummy) for each in (taking, leaving)
        )
    whole = bool(valid.all()) and not filled
    tensors = [source, request, previous, following, taking, leaving, mask]
    there: list[Any] = all_to_device(tensors if whole else [*tensors, valid[:, None, None, :]], device)
    return BlockLayout(*there, *([None] if whole else []))


def filled_size(count: int) -> int:
    """The next larger of 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ...: at most a quarter more."""
    step = max(4, 1 << max(0, count.bit_length() - 3))
    return (count // step + 1) * step

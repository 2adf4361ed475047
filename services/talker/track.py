"""A request's conditioning track as it arrives."""

from collections.abc import Sequence

import torch

from omnirelay.errors import RepeatedMessageError, SequenceError
from shared.messages.payloads import PromptEmbedsPayload
from shared.vllm.tensors import copy_rows

_FIRST_CAPACITY_MARGIN = 256


class ConditioningTrack:
    """Rows and position ids of the talker's positions, from 0 on, without gap.

    The talker may start when it has those of the prompt.  Of frames of more than one id the first is a token
    of the engine; ``further_codes`` are the others, as the model needs them at the frame's position.
    """

    def __init__(self, prompt_positions: int, width: int, dtype: torch.dtype, groups: int = 1) -> None:
        self.prompt_positions = prompt_positions
        self.further_codes: list[Sequence[int]] = []
        self._further = groups - 1
        self.length = 0
        self.closed = False
        self._next_seq = 0
        self._rows = torch.empty(prompt_positions + _FIRST_CAPACITY_MARGIN, width, dtype=dtype)
        self._positions = torch.empty(3, self._rows.shape[0], dtype=torch.int32)

    @property
    def available(self) -> float:
        """How many positions can be computed now; without bound once the track is closed."""
        return float("inf") if self.closed else self.length

    @property
    def speakable(self) -> bool:
        """False once it is certain that the reply has nothing to say: it ended before its first row."""
        return not self.closed or self.length >= self.prompt_positions

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._rows.nbytes + self._positions.nbytes

    def expect(self, seq: int, start: int) -> None:
        """Raise RepeatedMessageError at a message that came before, SequenceError unless it is the next."""
        if seq < self._next_seq:
            raise RepeatedMessageError(f"rows number {seq} came twice")
        if self.closed:
            raise SequenceError("rows after the last ones")
        if seq != self._next_seq or start != self.length:
            raise SequenceError(
                f"rows number {seq} from position {start}, "
                f"expected number {self._next_seq} from position {self.length}"
            )

    def append(self, rows: PromptEmbedsPayload, positions: torch.Tensor, last: bool) -> None:
        """Add the next rows ``[n, width]``, which fit, with their position ids ``[3, n]``."""
        stop = self.length + rows.shape[0]
        self._reserve(stop)
        copy_rows(rows, self._rows[self.length : stop])
        self._positions[:, self.length : stop] = positions
        self.length = stop
        self.closed = last
        self._next_seq += 1

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[n, width]`` and position ids int32 ``[3, n]``; raises SequenceError at a missing row.

        Past the end of a closed track the last row repeats, and its position id runs on.
        """
        if stop > self.available:
            raise SequenceError(f"position {stop - 1} has no row yet, {self.length} are there")
        if stop <= self.length:
            return self._rows[start:stop], self._positions[:, start:stop]
        if start >= self.length:
            beyond = torch.arange(start - self.length + 1, stop - self.length + 1, dtype=torch.int32)
            last = self.length - 1
            rows = self._rows[last : self.length].expand(stop - start, -1)
            return rows, self._positions[:, last : self.length] + beyond
        index = torch.arange(start, stop)
        held = index.clamp_max(self.length - 1)
        return self._rows[held], self._positions[:, held] + (index - held).to(torch.int32)

    def ids(self, start: int, stop: int, positions: torch.Tensor) -> torch.Tensor:
        """Add to position ids int32 ``[3, n]`` the further ids of the frames there: ``[3 + m, n]``."""
        if not self._further:
            return positions
        frames = range(start - self.prompt_positions, stop - self.prompt_positions)
        nothing = (0,) * self._further
        codes = [self.further_codes[frame] if frame >= 0 else nothing for frame in frames]
        return torch.cat([positions, torch.tensor(codes, dtype=torch.int32).T])

    def _reserve(self, length: int) -> None:
        if length <= self._rows.shape[0]:
            return
        capacity = max(length, 2 * self._rows.shape[0])
        rows, positions = self._rows, self._positions
        self._rows = torch.empty(capacity, rows.shape[1], dtype=rows.dtype)
        self._positions = torch.empty(3, capacity, dtype=torch.int32)
        self._rows[: self.length] = rows[: self.length]
        self._positions[:, : self.length] = positions[:, : self.length]

"""Which part of a stream of codec ids becomes which chunk of audio.  Pure logic, no torch.

A chunk's *target* is what it adds to the audio; its *window* is what the model computes: the target
and some blocks after it; of the blocks before it the model has kept what it needs.  Targets tile the
stream.  Their borders follow from the configuration and the length of the stream alone, never from when
ids arrived: so a stream that is resumed elsewhere is cut in the same places.  There the chunks that were
delivered are computed again for what they leave to the next, without their audio.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from omnirelay.errors import CheckpointError, ConfigError, InvalidRequestError


@dataclass(frozen=True)
class ChunkingConfig:
    """How streams are cut; sizes are in attention blocks of the DiT.

    Attributes:
        first_blocks: target of the first chunk; small, for it decides the time to first audio.
        growth: factor from one target to the next; larger chunks waste less work on context.
        max_blocks: the largest target.
        look_ahead_blocks: blocks after the target in the window.
        mode: ``stream``, or ``offline``: one chunk with everything, when everything is there.
    """

    first_blocks: int = 1
    growth: int = 2
    max_blocks: int = 8
    look_ahead_blocks: int = 1
    mode: Literal["stream", "offline"] = "stream"

    def __post_init__(self) -> None:
        if self.first_blocks < 1 or self.growth < 1 or self.max_blocks < self.first_blocks:
            raise ConfigError(
                "chunking: first_blocks and growth must be at least 1 and max_blocks at least first_blocks, "
                f"got {self.first_blocks}, {self.growth}, {self.max_blocks}"
            )
        if self.look_ahead_blocks < 0:
            raise ConfigError("chunking: look_ahead_blocks must not be negative")
        if self.mode not in ("stream", "offline"):
            raise ConfigError(f"chunking: mode {self.mode!r} is neither 'stream' nor 'offline'")


@dataclass(frozen=True)
class CodecGeometry:
    """How a checkpoint's codec frames, the units of its synthesizer and the blocks of chunks relate.

    With Qwen2.5-Omni a unit is a mel frame, and a block one of attention.

    Attributes:
        block_size: units in one block (``dit_config.block_size``).
        repeats: units that one codec frame lasts (``dit_config.repeats``).
        max_frames: longest window in units (``dit_config.max_position_embeddings``).
        groups: codec ids of a frame.
        ids: codec ids that can be synthesized; they are the smallest ones.
    """

    block_size: int
    repeats: int
    max_frames: int
    groups: int = 1
    ids: int = 2**31

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.block_size < 1 or self.block_size % self.repeats:
            raise CheckpointError(
                f"dit_config: block_size {self.block_size} is not a multiple of repeats {self.repeats}"
            )

    @property
    def codes_per_block(self) -> int:
        """Codec frames in one block."""
        return self.block_size // self.repeats

    def window_frames(self, codes: Sequence[int]) -> int:
        """Number of units that so many codec ids last."""
        return len(codes) // self.groups * self.repeats

    def check_codes(self, codes: Sequence[int]) -> None:
        """Refuse codec ids that cannot be synthesized.

        Raises:
            InvalidRequestError: an id is out of range, and the message names it and its place; or they are
                no whole frames.
        """
        if len(codes) % self.groups:
            raise InvalidRequestError(f"codes: {len(codes)} ids are no whole frames of {self.groups}")
        for position, code in enumerate(codes):
            if not 0 <= code < self.ids:
                raise InvalidRequestError(f"codes[{position}]: codec id {code!r} is not in 0..{self.ids - 1}")


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk; positions are indices of codec frames in the stream, ends exclusive.

    Attributes:
        index: number of the chunk.
        start: where target and window begin.
        target_end: where the target ends.
        window_end: where the window ends.
        is_last: whether the stream ends with the target.
        delivered: whether its audio was delivered before the stream was resumed.
    """

    index: int
    start: int
    target_end: int
    window_end: int
    is_last: bool
    delivered: bool = False


class ChunkPlanner:
    """Cuts one stream, chunk by chunk.

    Args:
        config: sizes and mode.
        geometry: of the checkpoint.
        resume_from: number of chunks of this stream that were already delivered.
    """

    def __init__(self, config: ChunkingConfig, geometry: CodecGeometry, resume_from: int = 0) -> None:
        self._config = config
        self._geometry = geometry
        self._finished = False
        self._delivered = resume_from
        if resume_from < 0 or (resume_from > 1 and config.mode == "offline"):
            raise InvalidRequestError(
                f"chunks_delivered: a stream of mode {config.mode} has no {resume_from} chunks"
            )
        self._last_delivered, _ = self._border(max(0, resume_from - 1))
        self._resumed_at, _ = self._border(resume_from)
        self._index = resume_from if config.mode == "offline" else 0
        self._start, self._blocks = self._border(0)

    @property
    def finished(self) -> bool:
        """Whether no chunk will follow: the last one was planned, or the stream ended empty."""
        return self._finished

    def next_plan(self, received: int, final: bool) -> ChunkPlan | None:
        """Plan the next chunk if its codec ids are there.

        Args:
            received: number of codec ids of the stream received so far.
            final: whether no more will come.

        Returns:
            The chunk, or None: wait for more ids or, where ``finished``, there is nothing left.

        Raises:
            InvalidRequestError: in offline mode the stream is longer than the model can take; or it has ended
                before the chunks that are said to have been delivered.
        """
        if self._finished:
            return None
        if final:
            self.check_end(received)
        if final and self._nothing_left(received):
            self._finished = True
            return None
        if self._config.mode == "offline":
            return self._plan_all(received) if final else None
        return self._plan_stream(received, final)

    def check_end(self, received: int) -> None:
        """Check the length of a stream that is there to its end.

        Raises:
            InvalidRequestError: it has ended before the chunks that are said to have been delivered.
        """
        if self._last_delivered and received < self._last_delivered + self._margin:
            raise InvalidRequestError(
                f"chunks_delivered: a stream of {received} codec ids has no {self._delivered} chunks"
            )

    @property
    def _target_codes(self) -> int:
        return self._blocks * self._geometry.codes_per_block

    @property
    def _look_ahead_codes(self) -> int:
        return self._config.look_ahead_blocks * self._geometry.codes_per_block

    @property
    def _margin(self) -> int:
        """Ids wanted beyond a target: the look-ahead, or one id, which proves that another chunk follows."""
        return max(self._look_ahead_codes, 1)

    def _nothing_left(self, received: int) -> bool:
        if self._config.mode == "offline":
            return self._index > 0 or received == 0
        if self._delivered == 0 and self._index == 0:
            return received == 0
        # Fewer ids than the margin after a border: the chunk before it was the last one and holds them.
        return received < max(self._start, self._resumed_at) + self._margin

    def _plan_stream(self, received: int, final: bool) -> ChunkPlan | None:
        end = self._start + self._target_codes
        look_ahead = self._look_ahead_codes
        complete = received >= end + self._margin
        if not complete and not final:
            return None
        if not complete:
            # The stream ends within the look-ahead.  Since a chunk is never cut before its look-ahead is
            # there, this cannot depend on timing; joining the rest to the target spares a tiny chunk.
            end = received
        return self._emit(
            ChunkPlan(
                index=self._index,
                start=self._start,
                target_end=end,
                window_end=min(received, end + look_ahead),
                is_last=not complete,
                delivered=self._index < self._delivered,
            )
        )

    def _plan_all(self, received: int) -> ChunkPlan:
        frames = received * self._geometry.repeats
        if frames > self._geometry.max_frames:
            raise InvalidRequestError(
                f"{received} codec ids are {frames} mel frames, more than the {self._geometry.max_frames} "
                "of dit_config.max_position_embeddings: use stream mode or a shorter answer"
            )
        return self._emit(ChunkPlan(0, 0, received, received, is_last=True))

    def _border(self, index: int) -> tuple[int, int]:
        """Where the target of a chunk begins, and how many blocks it has, if it is not the last."""
        start, blocks = 0, self._config.first_blocks
        while index and (larger := self._larger(blocks)) != blocks:
            start, blocks, index = start + blocks, larger, index - 1
        return (start + index * blocks) * self._geometry.codes_per_block, blocks

    def _larger(self, blocks: int) -> int:
        return min(self._config.max_blocks, blocks * self._config.growth)

    def _emit(self, plan: ChunkPlan) -> ChunkPlan:
        self._index += 1
        self._start = plan.target_end
        self._blocks = self._larger(self._blocks)
        self._finished = plan.is_last
        return plan

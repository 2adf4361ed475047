"""Which part of a stream of codec ids becomes which chunk of audio.  Pure logic, no torch.

A chunk's *target* is what it adds to the audio; its *window* is what the model computes: the target
and some blocks after it; of the blocks before it the model has kept what it needs.  Targets tile the
stream.  Their sizes are those that the request gives, or else chosen when the chunk is cut
(:mod:`services.token2wav.pace`).  A stream that is resumed elsewhere is cut there as it was up to the
last chunk that was delivered; these chunks are computed again for what they leave to the next, and only
the last of them is made audio, into which the next one's fades.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from omnirelay.errors import CheckpointError, InvalidRequestError, OmniRelayError, StateTransitionError
from omnirelay.values import SAMPLE_RATE
from shared.config import SynthesisConfig
from shared.messages import SpeechSettings

Pick = Callable[[Sequence[int], bool], int]
"""Chooses a target of the possible numbers of blocks, ascending; or 0, to wait for more, if it may."""


def largest(sizes: Sequence[int], may_wait: bool) -> int:
    """Take all that is there."""
    del may_wait
    return sizes[-1]


@dataclass(frozen=True)
class CodecGeometry:
    """How a checkpoint's codec frames, the units of its synthesizer and the blocks of chunks relate.

    With Qwen2.5-Omni a unit is a mel frame, and a block one of attention.
    """

    block_size: int  # Units in one block (``dit_config.block_size``)
    repeats: int  # Units that one codec frame lasts (``dit_config.repeats``)
    max_frames: int  # Longest window in units (``dit_config.max_position_embeddings``)
    unit_samples: int  # Samples that one unit lasts
    trimmed_samples: int = 0  # So much shorter than its frames is a stream, at its beginning
    groups: int = 1  # Codec ids of a frame
    ids: int = 2**31  # Codec ids that can be synthesized; they are the smallest ones

    def __post_init__(self) -> None:
        if self.repeats < 1 or self.block_size < 1 or self.block_size % self.repeats:
            raise CheckpointError(
                f"dit_config: block_size {self.block_size} is not a multiple of repeats {self.repeats}"
            )
        if self.unit_samples < 1:
            raise CheckpointError(f"a unit of {self.unit_samples} samples makes no sound")
        if not 0 <= self.trimmed_samples < self.frame_samples:
            raise CheckpointError(
                f"the first codec frame makes no sound: {self.trimmed_samples} of its {self.frame_samples} "
                "samples are trimmed"
            )

    @property
    def frame_samples(self) -> int:
        """Samples that one codec frame lasts."""
        return self.repeats * self.unit_samples

    @property
    def codes_per_block(self) -> int:
        """Codec frames in one block."""
        return self.block_size // self.repeats

    @property
    def block_s(self) -> float:
        """Seconds that one block lasts."""
        return self.block_size * self.unit_samples / SAMPLE_RATE

    def codec_frames(self, chunk_samples: Sequence[int]) -> list[int]:
        """Sizes of chunks in codec frames; raises InvalidRequestError if one is no whole number."""
        each = self.frame_samples
        for index, samples in enumerate(chunk_samples):
            if (samples and samples + (0 if index else self.trimmed_samples)) % each:
                raise InvalidRequestError(
                    f"chunk_samples[{index}]: {samples} is not a multiple of a codec frame's {each}"
                )
        # Only the first may be no multiple.
        return [-(-samples // each) for samples in chunk_samples]

    def window_frames(self, codes: Sequence[int]) -> int:
        """Number of units that so many codec ids last."""
        return len(codes) // self.groups * self.repeats

    def check_codes(self, codes: Sequence[int]) -> None:
        """Raise InvalidRequestError, naming an id and its place, at ids out of range or broken frames."""
        if len(codes) % self.groups:
            raise InvalidRequestError(f"codes: {len(codes)} ids are no whole frames of {self.groups}")
        for position, code in enumerate(codes):
            if not 0 <= code < self.ids:
                raise InvalidRequestError(f"codes[{position}]: codec id {code!r} is not in 0..{self.ids - 1}")


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk, in codec frames of the stream, ends exclusive.

    ``delivered`` by an earlier attempt; ``silent`` if the next one was, too.
    """

    index: int
    start: int
    target_end: int
    window_end: int
    is_last: bool
    delivered: bool = False
    silent: bool = False


class ChunkPlanner:
    """Cuts one stream, chunk by chunk.

    ``sizes`` are targets in codec frames, the last of which repeats; if there are none, targets are picked.
    ``delivered`` are those of the chunks of this stream that were already delivered.  Without ``streaming``
    all of it is one chunk.  Raises InvalidRequestError if no stream can be cut so.
    """

    def __init__(
        self,
        config: SynthesisConfig,
        geometry: CodecGeometry,
        sizes: Sequence[int] = (),
        delivered: Sequence[int] = (),
        streaming: bool = True,
    ) -> None:
        self._config = config
        self._streaming = streaming
        self._most_blocks = max(config.max_chunk_blocks, config.first_chunk_blocks)
        self._block = geometry.codes_per_block
        self._geometry = geometry
        # Ids wanted beyond a target: the look-ahead, or one id, which proves that another chunk follows.
        self._margin = max(config.look_ahead_blocks * self._block, 1)
        self._check_sizes(sizes)
        self._check_delivered(delivered)
        self._sizes, self._delivered = sizes, delivered
        self._resumed_at = sum(delivered)
        # What ends within a block was the end of its stream.
        self._was_last = bool(delivered) and (not streaming or not self._is_whole(delivered[-1]))
        self._finished = False
        self._index = self._start = 0

    @property
    def finished(self) -> bool:
        """Whether no chunk will follow: the last one was planned, or the stream ended empty."""
        return self._finished

    def next_plan(self, received: int, final: bool, pick: Pick = largest) -> ChunkPlan | None:
        """Plan the next chunk if its codec frames are there and ``pick`` does not want to wait for more.

        ``pick`` chooses the target if neither the request nor an earlier attempt did.

        Raises:
            InvalidRequestError: in offline mode the stream is longer than the model can take; or it has ended
                before the chunks that are said to have been delivered.
        """
        if self._finished:
            return None
        if final:
            self.check_end(received)
            if received == max(self._start, self._resumed_at):
                self._finished = True
                return None
        elif self._was_last:
            return None
        if not self._streaming:
            return self._plan_all(received) if final else None
        target = self._target(received - self._start, final, pick)
        return self._emit(target, received) if target else None

    def check_end(self, received: int) -> None:
        """Raise InvalidRequestError if a whole stream does not continue, or end with, what was delivered."""
        if not self._delivered or received == self._resumed_at:
            return
        if self._was_last or received < self._resumed_at + self._margin:
            raise InvalidRequestError(
                f"chunk_samples: a stream of {received} codec frames was not cut into {len(self._delivered)} "
                f"chunks of {self._resumed_at} together"
            )

    def _target(self, left: int, final: bool, pick: Pick) -> int:
        """Codec frames of the next target, of so many that are left; 0 to wait."""
        if self._index < len(self._delivered):
            fixed = self._delivered[self._index]
            return fixed if left >= fixed + self._margin else 0
        if self._sizes:
            fixed = self._sizes[min(self._index, len(self._sizes) - 1)]
        elif self._index == 0:
            fixed = self._config.first_chunk_blocks * self._block
        else:
            return self._picked(left, final, pick)
        if left >= fixed + self._margin:
            return fixed
        return left if final else 0

    def _picked(self, left: int, final: bool, pick: Pick) -> int:
        most = self._most_blocks
        whole = min(most, (left - self._margin) // self._block)
        sizes = list(range(1, whole + 1))
        # The stream ends within the look-ahead: joining the rest to the target spares a tiny chunk.
        rest = -(-left // self._block) if final and left < most * self._block + self._margin else 0
        if rest:
            sizes.append(rest)
        if not sizes:
            return 0
        blocks = pick(sizes, not final and whole < most)
        return left if blocks == rest and rest else blocks * self._block

    def _plan_all(self, received: int) -> ChunkPlan:
        self._check_window(received)
        self._finished = True
        return ChunkPlan(0, 0, received, received, is_last=True)

    def _emit(self, target: int, received: int) -> ChunkPlan:
        start, end = self._start, self._start + target
        # Unless it is the last one, all of its look-ahead is there.
        is_last = received < end + self._margin
        plan = ChunkPlan(
            index=self._index,
            start=start,
            target_end=end,
            window_end=min(received, end + self._config.look_ahead_blocks * self._block),
            is_last=is_last,
            delivered=self._index < len(self._delivered),
            silent=self._index + 1 < len(self._delivered),
        )
        self._check_window(plan.window_end - start)
        self._index += 1
        self._start = end
        self._finished = is_last
        return plan

    def _check_window(self, frames: int) -> None:
        units = frames * self._geometry.repeats
        if units > self._geometry.max_frames:
            raise InvalidRequestError(
                f"{frames} codec ids are {units} mel frames, more than the {self._geometry.max_frames} "
                "of dit_config.max_position_embeddings: use stream mode or a shorter answer"
            )

    def _is_whole(self, size: int) -> bool:
        return size > 0 and size % self._block == 0

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        if sizes and not self._streaming:
            raise InvalidRequestError("chunk_frames: an answer in one piece has no sizes of chunks")
        most = self._most_blocks * self._block
        for index, size in enumerate(sizes):
            if not self._is_whole(size) or size > most:
                raise InvalidRequestError(
                    f"chunk_frames[{index}]: {size} is not a multiple of {self._block} (a block) up to {most}"
                )

    def _check_delivered(self, delivered: Sequence[int]) -> None:
        if not self._streaming and len(delivered) > 1:
            raise InvalidRequestError(
                f"chunk_samples: a stream of mode offline has no {len(delivered)} chunks"
            )
        for index, size in enumerate(delivered[:-1]):
            if not self._is_whole(size):
                raise InvalidRequestError(
                    f"chunk_samples[{index}]: a chunk of {size} codec frames before others cuts a block "
                    f"of {self._block}"
                )
        if len(delivered) > 1 and delivered[-1] < 1:
            raise InvalidRequestError(f"chunk_samples[{len(delivered) - 1}]: the chunk is empty")


CHUNK_KEY: Final = "synthesis_chunk"


@dataclass(eq=False)
class StreamState:
    """What a stream's chunks, one after the other, leave for the next: the family's own, or None at first."""

    left: Any = None
    failure: OmniRelayError | None = None  # What ended its chunk in the engine

    def __deepcopy__(self, memo: dict[int, object]) -> "StreamState":
        """Return itself: vLLM copies a request's parameters, and this is not a value but a place."""
        return self


@dataclass(frozen=True, eq=False)
class SynthesisChunk:
    """Everything needed to turn one window of codec ids into audio."""

    codes: tuple[int, ...]  # Of the window, target and look-ahead: frame by frame
    start: int  # Index in the stream of the window's first unit (:class:`CodecGeometry`), on a block border
    target_end: int  # Index in the stream after the target's last unit
    seed: int  # Of the stream's noise, unsigned 64-bit; equal for all chunks of a stream
    speaker: str
    stream: StreamState = field(default_factory=StreamState)  # What the chunk before left
    is_last: bool = False  # Whether the stream ends with this target
    silent: bool = False  # Whether it is wanted only for what it leaves: it is not made audio
    due: float = 0.0  # When work must begin to be in time, in seconds of ``time.monotonic``

    @property
    def target_frames(self) -> int:
        """Number of units of the target."""
        return self.target_end - self.start


class AudioStream:
    """Cuts a stream into chunks, one in flight at a time, for each continues what the last one left.

    Takes delivered chunks, and raises, as :class:`services.token2wav.chunks.ChunkPlanner`.
    """

    def __init__(
        self,
        speech: SpeechSettings,
        config: SynthesisConfig,
        geometry: CodecGeometry,
        delivered: Sequence[int] = (),
    ) -> None:
        self._speech = speech
        self._repeats, self._groups = geometry.repeats, geometry.groups
        self._planner = ChunkPlanner(config, geometry, speech.chunk_frames, delivered, speech.streaming)
        self._codes: list[int] = []
        self._ended = False
        self._in_flight: ChunkPlan | None = None
        self._state = StreamState()

    @property
    def finished(self) -> bool:
        """Whether every chunk of the stream was accepted."""
        return self._planner.finished and self._in_flight is None

    @property
    def _received(self) -> int:
        """Codec frames so far."""
        return len(self._codes) // self._groups

    def extend(self, codes: Iterable[int]) -> None:
        """Add codec ids as they come; raises StateTransitionError after :meth:`end`."""
        if self._ended:
            raise StateTransitionError("codec ids came after the end of their stream")
        self._codes.extend(codes)

    def end(self) -> None:
        """Say that no more codec ids come; InvalidRequestError if too few for what was delivered."""
        self._planner.check_end(self._received)
        self._ended = True

    def next_chunk(self, pick: Pick = largest) -> SynthesisChunk | None:
        """The next chunk, or None: its ids are missing, it waits, one is in flight, or all were made.

        See :meth:`services.token2wav.chunks.ChunkPlanner.next_plan`.
        """
        if self._in_flight is not None:
            return None
        plan = self._planner.next_plan(self._received, self._ended, pick)
        if plan is None:
            return None
        self._in_flight = plan
        return SynthesisChunk(
            codes=tuple(self._codes[plan.start * self._groups : plan.window_end * self._groups]),
            start=plan.start * self._repeats,
            target_end=plan.target_end * self._repeats,
            seed=self._speech.seed,
            speaker=self._speech.speaker,
            stream=self._state,
            is_last=plan.is_last,
            silent=plan.silent,
        )

    def accept_chunk(self) -> bool:
        """Say that the chunk in flight was made; gives whether its audio is wanted.

        Raises StateTransitionError if no chunk is in flight.
        """
        if self._in_flight is None:
            raise StateTransitionError("a result came for a stream without a chunk in flight")
        wanted = not self._in_flight.delivered
        self._in_flight = None
        return wanted

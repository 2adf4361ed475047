"""What goes into the token2wav engine and what comes out: one chunk of one audio stream.

A chunk rides in ``PoolingParams.extra_kwargs``; its samples come back as the engine's pooler output, and an
error that ended it in the :class:`StreamState` that it rides with.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from omnirelay.errors import OmniRelayError

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

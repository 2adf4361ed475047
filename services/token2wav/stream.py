"""One audio stream: codec ids in as they come, chunks out as they can be made."""

from collections.abc import Iterable, Sequence

from omnirelay.errors import StateTransitionError
from services.token2wav.chunks import ChunkPlan, ChunkPlanner, CodecGeometry, Pick, largest
from services.token2wav.synthesis import StreamState, SynthesisChunk
from shared.config import SynthesisConfig
from shared.messages import SpeechSettings


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

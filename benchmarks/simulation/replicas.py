"""The replicas of the stages, as servers of batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Final, Generic, TypeVar

import simpy

from benchmarks.measure.workload import CODEC_RATE
from benchmarks.simulation.step_times import (
    CHUNK_BLOCKS,
    CODES_OF_A_BLOCK,
    LOOK_AHEAD,
    SPEECH_PROMPT,
    StepTime,
)
from benchmarks.simulation.stream import BLOCK_S, Stream
from shared.messages import StageName

MOST_REQUESTS: Final = 16
"""In a step, as ``max_num_seqs`` has it."""
MARGINS_S: Final = {"thinker": 2.0, "talker": 4.0, "token2wav": 0.5}
"""``playback_margin_s`` of the stages."""

Job = TypeVar("Job")
Changed = Callable[[Stream], None]
"""Called with a stream of which a replica has made something."""


class BatchServer(ABC, Generic[Job]):
    """Serves its jobs in steps, each with as many as may go together; sleeps while there is nothing to do.

    Attributes:
        jobs: Those that have not ended, in order of arrival.
        busy_s: Seconds in steps.
        steps: Their number.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self.env: Final = env
        self.jobs: list[Job] = []
        self.busy_s = 0.0
        self.steps = 0
        self._wake = env.event()
        env.process(self._run())

    def add(self, job: Job) -> None:
        """Take a job."""
        self.jobs.append(job)
        self.wake()

    def wake(self) -> None:
        """Look for work again: something that a job waited for is there."""
        if not self._wake.triggered:
            self._wake.succeed()

    @abstractmethod
    def batch(self) -> Sequence[Job]:
        """The jobs of the next step; none to sleep."""

    @abstractmethod
    def duration(self, batch: Sequence[Job]) -> float:
        """Seconds of a step."""

    @abstractmethod
    def finish(self, batch: Sequence[Job]) -> None:
        """A step has ended: note what it made, and remove the jobs that have ended."""

    def next_look(self) -> float | None:
        """Seconds until a sleeping server looks for work again by itself."""
        return None

    def _run(self) -> Generator[simpy.Event, object, None]:
        while True:
            batch = self.batch()
            if not batch:
                self._wake = self.env.event()
                after = self.next_look()
                yield self._wake if after is None else self._wake | self.env.timeout(after)
                continue
            seconds = self.duration(batch)
            yield self.env.timeout(seconds)
            self.busy_s += seconds
            self.steps += 1
            self.finish(batch)


class StageReplica(BatchServer[Stream]):
    """A replica of a stage.

    Args:
        name: Of the stage.
        time: Of its steps.
        changed: Told of each stream that has got on.
    """

    def __init__(self, env: simpy.Environment, name: StageName, time: StepTime, changed: Changed) -> None:
        super().__init__(env)
        self.name: Final[StageName] = name
        self._time = time
        self._changed = changed
        # Blocks of the chunks that are being computed.
        self._cut: dict[Stream, int] = {}

    def batch(self) -> Sequence[Stream]:
        """See :class:`BatchServer`; while some stream is due soon, those further ahead are passed over."""
        able = [each for each in self.jobs[:MOST_REQUESTS] if self.able(each)]
        margin_s = MARGINS_S[self.name]
        due = [each for each in able if each.slack_s(self.made_s(each), self.env.now) < margin_s]
        return due or able

    def finish(self, batch: Sequence[Stream]) -> None:
        """See :class:`BatchServer`."""
        for each in batch:
            self.advance(each)
            if self.ended(each):
                self.jobs.remove(each)
            self._changed(each)

    def duration(self, batch: Sequence[Stream]) -> float:
        """See :class:`BatchServer`."""
        return self._time(sum(self.units(each) for each in batch))

    @abstractmethod
    def able(self, stream: Stream) -> bool:
        """All that its next step needs is there."""

    @abstractmethod
    def units(self, stream: Stream) -> int:
        """What a stream costs in its next step."""

    @abstractmethod
    def made_s(self, stream: Stream) -> float:
        """Seconds of speech for which this stage's part is made."""

    @abstractmethod
    def advance(self, stream: Stream) -> None:
        """Its step has ended."""

    @abstractmethod
    def ended(self, stream: Stream) -> bool:
        """The stage has nothing more to do for it."""


class Thinker(StageReplica):
    """A prompt, then a token a step."""

    def able(self, stream: Stream) -> bool:
        """See :class:`StageReplica`."""
        return not self.ended(stream)

    def units(self, stream: Stream) -> int:
        """See :class:`StageReplica`."""
        return 1 if stream.written else stream.workload.prompt_tokens

    def made_s(self, stream: Stream) -> float:
        """See :class:`StageReplica`."""
        return stream.written / CODEC_RATE

    def advance(self, stream: Stream) -> None:
        """See :class:`StageReplica`."""
        stream.written += 1
        if stream.first_text is None:
            stream.first_text = self.env.now

    def ended(self, stream: Stream) -> bool:
        """See :class:`StageReplica`."""
        return stream.all_written


class Talker(StageReplica):
    """A prompt, then a codec token a step; each needs a text token, until the text is complete."""

    def able(self, stream: Stream) -> bool:
        """See :class:`StageReplica`."""
        return stream.all_written or stream.spoken < stream.written

    def units(self, stream: Stream) -> int:
        """See :class:`StageReplica`."""
        return 1 if stream.spoken else stream.workload.prompt_tokens + SPEECH_PROMPT

    def made_s(self, stream: Stream) -> float:
        """See :class:`StageReplica`."""
        return stream.spoken / CODEC_RATE

    def advance(self, stream: Stream) -> None:
        """See :class:`StageReplica`."""
        stream.spoken += 1

    def ended(self, stream: Stream) -> bool:
        """See :class:`StageReplica`."""
        return stream.all_spoken


class Token2Wav(StageReplica):
    """A chunk of each stream a round, cut when its listener needs it."""

    def able(self, stream: Stream) -> bool:
        """See :class:`StageReplica`."""
        return self._target(stream) > 0 and self._wait_s(stream) <= 0

    def units(self, stream: Stream) -> int:
        """See :class:`StageReplica`."""
        return self._target(stream) + LOOK_AHEAD

    def made_s(self, stream: Stream) -> float:
        """See :class:`StageReplica`."""
        return stream.sent_blocks * BLOCK_S

    def duration(self, batch: Sequence[Stream]) -> float:
        """See :class:`BatchServer`."""
        # A target may grow while it is computed, but not in the engine.
        self._cut = {each: self._target(each) for each in batch}
        return super().duration(batch)

    def advance(self, stream: Stream) -> None:
        """See :class:`StageReplica`."""
        stream.take_audio(self._cut[stream], self.env.now)

    def ended(self, stream: Stream) -> bool:
        """See :class:`StageReplica`."""
        return stream.done is not None

    def next_look(self) -> float | None:
        """See :class:`BatchServer`."""
        waits = [self._wait_s(each) for each in self.jobs[:MOST_REQUESTS] if self._target(each)]
        return max(1e-6, min(waits)) if waits else None

    def _target(self, stream: Stream) -> int:
        """Blocks of the chunk that could be cut now; 0 if there are too few codec tokens."""
        left = stream.blocks - stream.sent_blocks
        there = left
        if not stream.all_spoken:
            there = stream.spoken // CODES_OF_A_BLOCK - LOOK_AHEAD - stream.sent_blocks
        most = CHUNK_BLOCKS[-1] if stream.chunks else CHUNK_BLOCKS[0]
        return max(0, min(there, left, most))

    def _wait_s(self, stream: Stream) -> float:
        """Seconds until the next chunk has to be cut, for it to be there in time."""
        target = self._target(stream)
        if not stream.chunks or stream.all_spoken or target == CHUNK_BLOCKS[-1]:
            return 0.0
        playing_s = max(0.0, stream.heard_until - self.env.now)
        return playing_s - MARGINS_S[self.name] - self._time(target + LOOK_AHEAD)

"""A stack of any number of replicas, and the speakers that use it."""

import random
from collections.abc import Generator, Iterator
from typing import Final

import msgspec
import simpy

from benchmarks.measure.results import percentile
from benchmarks.measure.workload import Workload
from benchmarks.simulation.replicas import StageReplica, Talker, Thinker, Token2Wav
from benchmarks.simulation.step_times import StepTimes
from benchmarks.simulation.stream import Stream
from shared.messages import StageName


class Replicas(msgspec.Struct, frozen=True, kw_only=True):
    """How many of each stage."""

    thinker: int = 1
    talker: int = 1
    token2wav: int = 1

    @property
    def total(self) -> int:
        """All together."""
        return self.thinker + self.talker + self.token2wav


class Speakers(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks.

    Attributes:
        count: How many; each has at most one answer at a time.
        workload: Of each answer.
        pause_s: Mean time from the end of an answer, heard or not, until the next request; exponential.
        hear: The next request comes when the answer has been heard, not when it is complete.
        rounds: Answers of each; without, until the simulation ends.
        at_least: Answers of all, if more.
    """

    count: int
    workload: Workload
    pause_s: float = 0.0
    hear: bool = True
    rounds: int | None = None
    at_least: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a simulation.

    Attributes:
        seconds: How long it was, simulated.
        asked: Requests.
        answers: Those that were completed, in their order.
        open: The others.
        busy: Share of the time that the replicas of each stage worked.
    """

    seconds: float
    asked: int
    answers: list["Answer"]
    open: int
    busy: dict[str, float]

    def after(self, begin_s: float) -> "Outcome":
        """The answers to requests from then on."""
        return msgspec.structs.replace(self, answers=[each for each in self.answers if each.asked >= begin_s])

    def ttfa_s(self, share: float) -> float:
        """A percentile of the times to first audio."""
        return percentile([each.ttfa_s for each in self.answers], share)

    @property
    def silent(self) -> float:
        """Share of the answers in which the listener had to wait for the next piece."""
        return sum(each.silent_s > 0 for each in self.answers) / len(self.answers) if self.answers else 0.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one answer."""

    asked: float
    ttft_s: float
    ttfa_s: float
    completion_s: float
    silent_s: float


class SimulatedStack:
    """The replicas, and the gateway's choice among them.

    Args:
        times: Of steps.
        replicas: How many.
        seed: Of all random choices.
        hop_s: From one process to the next.
    """

    def __init__(self, times: StepTimes, replicas: Replicas, seed: int = 0, hop_s: float = 0.0) -> None:
        self.env: Final = simpy.Environment()
        self._random = random.Random(seed)
        self._hop_s = hop_s
        kinds: dict[StageName, type[StageReplica]] = {
            "thinker": Thinker,
            "talker": Talker,
            "token2wav": Token2Wav,
        }
        self._stages = [
            [
                kind(self.env, name, getattr(times, name), self._changed)
                for _ in range(getattr(replicas, name))
            ]
            for name, kind in kinds.items()
        ]
        self._routes: dict[Stream, list[StageReplica]] = {}
        self._ends: dict[Stream, simpy.Event] = {}
        self._asked = 0
        self._answers: list[Answer] = []

    def run(self, speakers: Speakers, seconds: float | None = None) -> Outcome:
        """Let them ask for so long, or until all have had their rounds."""
        total = None
        if speakers.rounds is not None:
            total = max(speakers.at_least, speakers.count * speakers.rounds)
        turns = iter(range(total)) if total is not None else None
        running = [self.env.process(self._speak(speakers, turns)) for _ in range(speakers.count)]
        self.env.run(until=seconds if seconds is not None else self.env.all_of(running))
        now = self.env.now
        return Outcome(
            seconds=now,
            asked=self._asked,
            answers=self._answers,
            open=len(self._routes),
            busy={
                stage[0].name: sum(each.busy_s for each in stage) / (now * len(stage))
                for stage in self._stages
            },
        )

    def _speak(self, speakers: Speakers, turns: Iterator[int] | None) -> Generator[simpy.Event, object, None]:
        """One speaker, who begins somewhere in a conversation."""
        if speakers.pause_s:
            cycle_s = speakers.pause_s + speakers.workload.seconds
            yield self.env.timeout(self._random.random() * cycle_s)
        while turns is None or next(turns, None) is not None:
            stream = Stream(speakers.workload, self.env.now)
            self._asked += 1
            end = self._ends[stream] = self.env.event()
            yield self.env.timeout(self._hop_s)
            self._begin(stream)
            yield end
            if speakers.hear:
                yield self.env.timeout(max(0.0, stream.heard_until - self.env.now))
            if speakers.pause_s:
                yield self.env.timeout(self._random.expovariate(1 / speakers.pause_s))

    def _begin(self, stream: Stream) -> None:
        """Place a request on the replicas with the fewest."""
        route = [min(stage, key=lambda each: len(each.jobs)) for stage in self._stages]
        self._routes[stream] = route
        for each in route:
            each.add(stream)

    def _changed(self, stream: Stream) -> None:
        """A replica has made a part of a stream: the next stages may go on."""
        for each in self._routes[stream]:
            each.wake()
        if stream.done is not None:
            self._complete(stream)

    def _complete(self, stream: Stream) -> None:
        del self._routes[stream]
        ttft, ttfa, done = stream.first_text or 0.0, stream.first_audio or 0.0, stream.done or 0.0
        answer = Answer(
            asked=stream.asked,
            ttft_s=ttft + self._hop_s - stream.asked,
            # Codec ids and audio go on to the next process, too.
            ttfa_s=ttfa + 3 * self._hop_s - stream.asked,
            completion_s=done + 3 * self._hop_s - stream.asked,
            silent_s=stream.silent_s,
        )
        self._answers.append(answer)
        self._ends.pop(stream).succeed()


def simulate(
    times: StepTimes,
    replicas: Replicas,
    speakers: Speakers,
    seconds: float | None = None,
    seed: int = 0,
    hop_s: float = 0.001,
) -> Outcome:
    """Run one simulation; the same arguments give the same outcome."""
    return SimulatedStack(times, replicas, seed, hop_s).run(speakers, seconds)

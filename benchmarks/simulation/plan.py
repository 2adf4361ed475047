"""How many replicas so many speakers need."""

import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from benchmarks.measure.workload import answer_of
from benchmarks.simulation.stack import Outcome, Replicas, Speakers, simulate
from benchmarks.simulation.step_times import StepTimes
from shared.messages import STAGES

TTFA_S: Final = 0.5
"""The goal for the 95th percentile of the time to first audio."""
ANSWER_S: Final = 10.0
PAUSE_S: Final = 5.0
"""Mean time from the end of an answer until its listener asks again."""
WARM_S: Final = 20.0
"""Answers to earlier requests do not count."""
SECONDS: Final = 60.0
SEARCHED: Final = 64
"""For more speakers the replicas for fewer are repeated, and only checked."""
SEEDS: Final = (1, 2)
"""Replicas are enough if they are with each."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Replicas that are enough, and of each stage no more than needed.

    Attributes:
        speakers: For how many.
        replicas: How many; none if no number is enough.
        ttfa_p95_s: With them, or with a replica of each stage for each speaker if none are enough.
        silent: Share of answers with silence then.
    """

    speakers: int
    replicas: Replicas | None
    ttfa_p95_s: float
    silent: float


def speakers_of(count: int) -> Speakers:
    """Listeners who ask for speech of :data:`ANSWER_S`, hear it, and ask again."""
    return Speakers(count=count, workload=answer_of(ANSWER_S), pause_s=PAUSE_S)


def outcome(times: StepTimes, replicas: Replicas, count: int, seed: int = SEEDS[0]) -> Outcome:
    """Simulate the answers to requests of :data:`SECONDS`."""
    return simulate(times, replicas, speakers_of(count), WARM_S + SECONDS, seed).after(WARM_S)


def reached(outcome: Outcome, ttfa_s: float = TTFA_S) -> bool:
    """Whether the first audio came in time, and no listener ever waited for the next piece."""
    return bool(outcome.answers) and outcome.ttfa_s(0.95) < ttfa_s and outcome.silent == 0


def plans(times: StepTimes, counts: Sequence[int], ttfa_s: float = TTFA_S) -> list[Plan]:
    """Find enough replicas for ascending numbers of speakers; each search begins with the one before."""
    found: list[Plan] = []
    for count in counts:
        begin = scaled(found, count) or Replicas()

        def enough(replicas: Replicas, count: int = count) -> bool:
            return all(reached(outcome(times, replicas, count, seed), ttfa_s) for seed in SEEDS)

        replicas = enlarged(enough, begin, count)
        if replicas is not None and count <= SEARCHED:
            replicas = fewest(enough, replicas)
        shown = outcome(times, replicas or Replicas(thinker=count, talker=count, token2wav=count), count)
        found.append(
            Plan(speakers=count, replicas=replicas, ttfa_p95_s=shown.ttfa_s(0.95), silent=shown.silent)
        )
    return found


def enlarged(enough: Callable[[Replicas], bool], begin: Replicas, most: int) -> Replicas | None:
    """Add replicas of all stages until they are enough; none if even ``most`` of each are not."""
    while not enough(begin):
        if min(begin.thinker, begin.talker, begin.token2wav) >= most:
            return None
        begin = Replicas(**{stage: min(most, math.ceil(1.25 * getattr(begin, stage))) for stage in STAGES})
    return begin


def fewest(enough: Callable[[Replicas], bool], begin: Replicas) -> Replicas:
    """Take replicas away, a tenth of a stage at a time, until none can be spared; all of them are enough."""
    taken = {stage: max(1, getattr(begin, stage) // 10) for stage in STAGES}
    while taken:
        # The stage with the most replicas first.
        stage = max(taken, key=lambda each: getattr(begin, each))
        number = getattr(begin, stage) - taken[stage]
        fewer = msgspec.structs.replace(begin, **{stage: number})
        if number > 0 and enough(fewer):
            begin = fewer
        elif taken[stage] > 1:
            taken[stage] = 1
        else:
            del taken[stage]
    return begin


def scaled(plans: Sequence[Plan], count: int) -> Replicas | None:
    """Replicas for more speakers than were simulated: the largest plan, as often as needed."""
    largest = max((each for each in plans if each.replicas), key=lambda each: each.speakers, default=None)
    if largest is None or largest.replicas is None:
        return None
    times, each = math.ceil(count / largest.speakers), largest.replicas
    return Replicas(**{stage: times * getattr(each, stage) for stage in STAGES})

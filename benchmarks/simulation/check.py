"""A simulation of a benchmark's own loads, beside what was measured."""

import math
from collections.abc import Callable, Sequence
from statistics import mean, median

import msgspec

from benchmarks.measure.answer import Timing
from benchmarks.measure.load import Load
from benchmarks.measure.results import RunResult
from benchmarks.parts.scenarios import CONCURRENCY, FEWEST
from benchmarks.simulation.stack import Outcome, Replicas, Speakers, simulate
from benchmarks.simulation.step_times import StepTimes


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, both ways."""

    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Of the simulated value, relative."""
        return self.simulated / self.measured - 1 if self.measured else math.nan


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One number of clients on one machine, each figure a median, but for requests and silence: means.

    Attributes:
        clients: How many asked at once.
        ttft_s: Time to first text.
        ttfa_s: Time to first audio.
        completion_s: Time to the end.
        requests_per_s: Answers a second.
        silent_s: Silence between pieces, an answer.
    """

    clients: int
    ttft_s: Pair
    ttfa_s: Pair
    completion_s: Pair
    requests_per_s: Pair
    silent_s: Pair


def check(result: RunResult, times: StepTimes) -> list[Check]:
    """Simulate each of OmniRelay's loads of a run, with one replica of each stage."""
    by_clients: dict[int, list[Load]] = {}
    for load in result.loads:
        if (load.adapter, load.scenario) == ("omnirelay", CONCURRENCY):
            by_clients.setdefault(load.clients, []).append(load)
    return [_check(clients, loads, times) for clients, loads in sorted(by_clients.items())]


def _check(clients: int, loads: Sequence[Load], times: StepTimes) -> Check:
    count = len(loads[0].answers)
    speakers = Speakers(
        count=clients, workload=loads[0].workload, hear=False, rounds=count // clients, at_least=FEWEST
    )
    simulated = simulate(times, Replicas(), speakers)
    answers = [answer for load in loads for answer in load.answers]
    return Check(
        clients=clients,
        ttft_s=_medians(answers, simulated, lambda each: each.ttft_s),
        ttfa_s=_medians(answers, simulated, lambda each: each.ttfa_s),
        completion_s=_medians(answers, simulated, lambda each: each.completion_s),
        requests_per_s=Pair(
            measured=mean(load.requests_per_s for load in loads),
            simulated=len(simulated.answers) / simulated.seconds,
        ),
        silent_s=Pair(
            measured=mean(each.stalled_s for each in answers),
            simulated=mean(each.silent_s for each in simulated.answers),
        ),
    )


def _medians(answers: Sequence[Timing], simulated: Outcome, figure: Callable[..., float]) -> Pair:
    return Pair(measured=median(map(figure, answers)), simulated=median(map(figure, simulated.answers)))

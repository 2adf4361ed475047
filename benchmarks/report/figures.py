"""The figures that say how well it does: ratios within one run, each with its goal.

They are made of medians, so that a single answer that the machine held up does not decide.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

from benchmarks.measure.load import Load
from benchmarks.measure.results import RunResult, mean, percentile
from benchmarks.parts.scenarios import ALONE, AMONG, CONCURRENCY, LONG, SHORT

OVERHEAD: Final = ("take", "engine", "send")
"""What a stage's loop does that is neither waiting nor the model's."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure.

    Attributes:
        name: What it is.
        value: In its unit.
        goal: What it should be.
        unit: ``x`` for a ratio.
        at_least: The goal is a lower bound; else an upper one.
    """

    name: str
    value: float
    goal: float | None
    unit: str = "x"
    at_least: bool = False

    @property
    def verdict(self) -> str:
        """Whether the goal is reached; empty without a goal."""
        if self.goal is None:
            return ""
        reached = self.value >= self.goal if self.at_least else self.value <= self.goal
        return "reached" if reached else "missed"


def loads_of(result: RunResult, adapter: str, clients: int | None = None) -> list[Load]:
    """The loads that are compared, of one server; at all numbers of clients, or at one."""
    return [
        load
        for load in result.loads
        if load.scenario == CONCURRENCY and load.adapter == adapter and clients in (None, load.clients)
    ]


def levels_of(result: RunResult, adapter: str) -> list[int]:
    """Numbers of clients at which a server was measured."""
    return sorted({load.clients for load in loads_of(result, adapter)})


def throughput(loads: list[Load]) -> float:
    """Requests a second over several loads."""
    return sum(len(load.answers) for load in loads) / sum(load.wall_s for load in loads)


def overhead(load: Load) -> float:
    """Seconds that were not a model's: of the stages' loops, and of the gateway's processor."""
    stages = sum(stage.seconds[activity] for stage in load.stages for activity in OVERHEAD)
    return stages + load.cpu_s.get("gateway", 0.0)


def figures(result: RunResult) -> list[Figure]:
    """All figures that the run allows."""
    return [*_latency(result), *_throughput(result), *_costs(result)]


def _completion(loads: list[Load]) -> float:
    return percentile([answer.completion_s for load in loads for answer in load.answers], 0.5)


def _latency(result: RunResult) -> Iterator[Figure]:
    alone, reference = loads_of(result, "omnirelay", 1), loads_of(result, "transformers", 1)
    goals = result.checkpoint == "bench"
    if alone and reference:
        heard = percentile([answer.ttfa_s for load in alone for answer in load.answers], 0.5)
        completion = _completion(reference)
        yield Figure(
            name="time to first audio / transformers' completion, 1 client",
            value=heard / completion,
            goal=0.12 if goals else None,
        )
        yield Figure(
            name="completion / transformers' completion, 1 client",
            value=_completion(alone) / completion,
            goal=0.7 if goals else None,
        )
    heard_by = {each.condition: percentile(each.seconds, 0.5) for each in result.first_audio}
    if heard_by:
        yield Figure(
            name=f"time to first audio, {LONG} / {SHORT}", value=heard_by[LONG] / heard_by[SHORT], goal=1.1
        )
        yield Figure(
            name=f"time to first audio, {AMONG} / {ALONE}", value=heard_by[AMONG] / heard_by[ALONE], goal=3.0
        )


def _throughput(result: RunResult) -> Iterator[Figure]:
    reference = loads_of(result, "transformers", 1)
    rates = {
        level: percentile([load.requests_per_s for load in loads_of(result, "omnirelay", level)], 0.5)
        for level in levels_of(result, "omnirelay")
    }
    if reference:
        for level, rate in rates.items():
            yield Figure(
                name=f"requests/s / transformers', one after another, {level} client{'s' * (level > 1)}",
                value=rate * _completion(reference),
                goal=2.5 if level == 8 and result.checkpoint == "bench" else None,
                at_least=True,
            )
    if {8, 16} <= rates.keys():
        yield Figure(
            name="requests/s, 16 clients / 8 clients", value=rates[16] / rates[8], goal=1.0, at_least=True
        )


def _costs(result: RunResult) -> Iterator[Figure]:
    if result.synthesis:
        costs = [mean(each.seconds) / each.audio_s for each in result.synthesis]
        yield Figure(
            name="token2wav's cost per second of audio, longest / shortest stream",
            value=costs[-1] / costs[0],
            goal=1.1,
        )
        yield Figure(
            name="token2wav's cost per second of audio, largest / smallest over all lengths",
            value=max(costs) / min(costs),
            goal=1.1,
        )
        yield Figure(
            name="token2wav's peak memory, longest / shortest stream",
            value=result.synthesis[-1].peak_memory / result.synthesis[0].peak_memory,
            goal=1.1,
        )
    alone = loads_of(result, "omnirelay", 1)
    if alone:
        completions = sum(answer.completion_s for load in alone for answer in load.answers)
        yield Figure(
            name="all that is no model's, of the completion time, 1 client",
            value=100 * sum(map(overhead, alone)) / completions,
            goal=5.0 if result.checkpoint == "bench" else None,
            unit="%",
        )
    if result.floor:
        bare, ours = (each.beside_ms for each in result.floor)
        yield Figure(
            name="a decoding step beside its model, the talker's / bare vLLM's", value=ours / bare, goal=1.2
        )
    goals = (0.3, 10.0)
    # Of the others, those with keys are in the table.
    shown = [*zip(result.hops, goals, strict=False), *((hop, None) for hop in result.hops[2 * len(goals) :])]
    for hop, goal in shown:
        yield Figure(
            name=f"a hop of {hop.message}, P50", value=percentile(hop.total_ms, 0.5), goal=goal, unit="ms"
        )
        yield Figure(
            name=f"a hop of {hop.message}, P95", value=percentile(hop.total_ms, 0.95), goal=None, unit="ms"
        )
    if among := loads_of(result, "omnirelay", 8):
        delays = [1000 * each for load in among for answer in load.answers for each in answer.delivery_s]
        yield Figure(
            name="from a chunk of audio made to the client, 8 clients, P95",
            value=percentile(delays, 0.95),
            goal=2.0,
            unit="ms",
        )

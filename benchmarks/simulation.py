"""Stacks of any size, simulated with the step times that ``python -m benchmarks`` measured.

``python -m benchmarks.simulation --help``; docs/scaling.md says what is simulated and how far to trust it.
"""

import argparse
import itertools
import math
import random
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Final, NamedTuple

import numpy as np
import simpy

from benchmarks.measure.checkpoints import SIZES
from benchmarks.measure.load import CONCURRENCY, FEWEST, Load
from benchmarks.measure.results import RESULTS, Cell, RunResult, Table, keep, percentile, read, tell
from benchmarks.measure.workload import CODEC_RATE, Workload, answer_of
from omnirelay.errors import OmniRelayError
from shared.messages import STAGES, StageName

BLOCK_CODES, LOOK_AHEAD, SPEECH_PROMPT, MOST_REQUESTS = 12, 1, 2, 16
"""Codec tokens of a block of the DiT, blocks beyond a chunk, the talker's longer prompt, ``max_num_seqs``."""
FIRST_BLOCKS: Final = (1, 2, 4, 8)
"""Blocks of a stream's first chunks; the rest have the last."""
SPEECH_S: Final = {"thinker": 1 / CODEC_RATE, "talker": 1 / CODEC_RATE, "token2wav": BLOCK_CODES / CODEC_RATE}
"""Seconds of speech of a text token, a codec token, a block."""
MARGINS_S: Final = {"thinker": 2.0, "talker": 4.0, "token2wav": 0.5}
"""``playback_margin_s`` of the stages."""
TTFA_S, ANSWER_S, PAUSE_S, WARM_S, SECONDS = 0.5, 10.0, 5.0, 20.0, 60.0
SEARCHED, SEEDS, BEYOND = 64, (1, 2), (1_000, 10_000, 100_000, 1_000_000)
"""For more speakers than that, and beyond the plans, replicas for fewer are repeated."""
FASTER: Final = 4
"""So many times as fast is the imagined machine that `small` is planned for, too."""
CHECKED: Final = {"first text, s": "ttft_s", "first audio, s": "ttfa_s", "completion, s": "completion_s"}


class StepTime(NamedTuple):
    """Seconds of a step: ``step_s + unit_s * units``; units are tokens, or blocks of chunks' windows."""

    step_s: float
    unit_s: float

    def __call__(self, units: float) -> float:
        """Seconds of a step with so many units."""
        return self.step_s + self.unit_s * units


Times = Mapping[StageName, StepTime]
Replicas = dict[StageName, int]


def faster(times: Times, factor: float) -> Times:
    """The step times of a machine so many times as fast."""
    return {stage: StepTime(time.step_s / factor, time.unit_s / factor) for stage, time in times.items()}


def fit(result: RunResult) -> Times:
    """Fit step times to the seconds that the stages' loops worked, by least squares of relative errors.

    The answers' times are not used: the simulation is checked against them.

    Raises:
        OmniRelayError: The run has fewer than two loads of OmniRelay.
    """
    loads = [each for each in result.loads if each.adapter == "omnirelay"]
    if len(loads) < 2:
        raise OmniRelayError(
            f"step times of {result.checkpoint} cannot be fitted to {len(loads)} loads, they need two: "
            "measure more numbers of clients"
        )
    return {stage: _fit([_worked(load, stage) for load in loads]) for stage in STAGES}


def _worked(load: Load, stage: StageName) -> tuple[float, float, float]:
    """A load's steps, units, and seconds of work of a stage."""
    counted = next(each for each in load.stages if each.name == stage)
    answers, steps = len(load.answers), float(counted.steps)
    if stage == "token2wav":
        # An engine's step is a step of the solver, or several; so rounds are counted by chunks.
        targets = chunk_targets(-(-load.workload.codec_tokens // BLOCK_CODES))
        chunks = answers * len(targets)
        steps, units = chunks / counted.mean_batch, float(answers * sum(targets) + chunks * LOOK_AHEAD)
    else:
        prompt = load.workload.prompt_tokens + (SPEECH_PROMPT if stage == "talker" else 0)
        units = steps * counted.mean_batch + answers * prompt
    return steps, units, sum(seconds for activity, seconds in counted.seconds.items() if activity != "wait")


def chunk_targets(blocks: int) -> list[int]:
    """Blocks of each chunk of a stream that is synthesized without haste."""
    targets: list[int] = []
    while blocks:
        targets.append(min(blocks, FIRST_BLOCKS[min(len(targets), len(FIRST_BLOCKS) - 1)]))
        blocks -= targets[-1]
    return targets


def _fit(rows: Sequence[tuple[float, float, float]]) -> StepTime:
    """The two coefficients, neither negative."""
    columns = np.array([(steps / seconds, units / seconds) for steps, units, seconds in rows])
    step_s, unit_s = np.linalg.lstsq(columns, np.ones(len(rows)), rcond=None)[0]
    if step_s < 0 or unit_s < 0:
        # The other one alone.
        number = int(step_s < 0)
        alone = columns[:, number]
        step_s, unit_s = np.eye(2)[number] * alone.sum() / (alone @ alone)
    return StepTime(float(step_s), float(unit_s))


@dataclass(eq=False)
class Stream:
    """One answer; ``made`` are its text tokens, codec tokens and blocks of audio, by stage."""

    workload: Workload
    asked: float
    end: simpy.Event
    route: list["Replica"] = field(default_factory=list)
    made: dict[StageName, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    whole: dict[StageName, int] = field(init=False)
    chunks: int = 0
    ttft_s: float = math.nan
    ttfa_s: float = math.nan
    completion_s: float = math.nan
    heard_until: float = 0.0
    silent_s: float = 0.0

    def __post_init__(self) -> None:
        blocks = -(-self.workload.codec_tokens // BLOCK_CODES)
        parts = (self.workload.text_tokens, self.workload.codec_tokens, blocks)
        self.whole = dict(zip(STAGES, parts, strict=True))

    def left(self, stage: StageName) -> int:
        """What a stage has still to make."""
        return max(0, self.whole[stage] - self.made[stage])

    def slack_s(self, stage: StageName, now: float) -> float:
        """By how many seconds of speech a stage is ahead of the listener."""
        sent_s = self.made["token2wav"] * SPEECH_S["token2wav"]
        heard_s = sent_s - max(0.0, self.heard_until - now) if self.chunks else 0.0
        return self.made[stage] * SPEECH_S[stage] - heard_s

    def target(self) -> int:
        """Blocks of the chunk that could be cut now; 0 if there are too few codec tokens."""
        left = self.left("token2wav")
        ready = self.made["talker"] // BLOCK_CODES - LOOK_AHEAD - self.made["token2wav"]
        most = FIRST_BLOCKS[-1] if self.chunks else FIRST_BLOCKS[0]
        return max(0, min(ready if self.left("talker") else left, left, most))

    def units(self, stage: StageName) -> int:
        """What it can have made in its next step, which computes the prompt or one token, or a chunk."""
        if stage == "token2wav":
            return self.target()
        if stage == "talker" and self.left("thinker") and self.made["talker"] >= self.made["thinker"]:
            return 0
        return 1 if self.left(stage) else 0

    def cost(self, stage: StageName, units: int) -> int:
        """Units of time of its next step."""
        if stage == "token2wav":
            return units + LOOK_AHEAD
        first = self.workload.prompt_tokens + (SPEECH_PROMPT if stage == "talker" else 0)
        return 1 if self.made[stage] else first

    def advance(self, stage: StageName, units: int, now: float) -> None:
        """A step has ended; of a chunk, the listener plays from the first one on."""
        self.made[stage] += units
        if math.isnan(self.ttft_s):
            self.ttft_s = now - self.asked
        if stage != "token2wav":
            return
        if not self.chunks:
            self.ttfa_s, self.heard_until = now - self.asked, now
        self.silent_s += max(0.0, now - self.heard_until)
        self.heard_until = max(now, self.heard_until) + units * SPEECH_S[stage]
        self.chunks += 1
        if not self.left(stage):
            self.completion_s = now - self.asked
            self.end.succeed()


class Replica:
    """A replica of a stage: works in steps, each with as many of its streams as are due, or able."""

    def __init__(self, env: simpy.Environment, stage: StageName, time: StepTime) -> None:
        self.streams: list[Stream] = []
        self._env, self._stage, self._time = env, stage, time
        self._wake = env.event()
        env.process(self._run())

    def wake(self) -> None:
        """Look for work: something that a stream waited for is there."""
        if not self._wake.triggered:
            self._wake.succeed()

    def _wait_s(self, stream: Stream) -> float:
        """Seconds until a stream's next chunk has to be cut, for it to be there in time."""
        target = stream.target()
        if not stream.chunks or not stream.left("talker") or target == FIRST_BLOCKS[-1]:
            return 0.0
        playing_s = max(0.0, stream.heard_until - self._env.now)
        return playing_s - MARGINS_S[self._stage] - self._time(target + LOOK_AHEAD)

    def _run(self) -> Generator[simpy.Event, object, None]:
        while True:
            stage, now = self._stage, self._env.now
            able = {each: units for each in self.streams[:MOST_REQUESTS] if (units := each.units(stage))}
            waits = {each: self._wait_s(each) for each in able} if stage == "token2wav" else {}
            able = {each: units for each, units in able.items() if waits.get(each, 0.0) <= 0}
            # While some are due soon, those further ahead are passed over.
            due = [each for each in able if each.slack_s(stage, now) < MARGINS_S[stage]]
            batch = {each: able[each] for each in due or able}
            if not batch:
                self._wake = self._env.event()
                sleep = self._env.timeout(max(1e-6, min(waits.values()))) if waits else None
                yield self._wake if sleep is None else self._wake | sleep
                continue
            seconds = self._time(sum(each.cost(stage, units) for each, units in batch.items()))
            yield self._env.timeout(seconds)
            for each, units in batch.items():
                each.advance(stage, units, self._env.now)
                if not each.left(stage):
                    self.streams.remove(each)
                for replica in each.route:
                    replica.wake()


@dataclass(frozen=True, kw_only=True)
class Speakers:
    """Who asks: each has one answer at a time, and hears it before it pauses for ``pause_s`` on average.

    With ``total`` they ask for so many answers, and hear none of them out; else until the simulation ends.
    """

    count: int
    workload: Workload
    pause_s: float = 0.0
    total: int | None = None


class Outcome(NamedTuple):
    """What came of a simulation of ``seconds``."""

    seconds: float
    answers: list[Stream]

    def after(self, begin_s: float) -> "Outcome":
        """The answers to requests from then on."""
        return self._replace(answers=[each for each in self.answers if each.asked >= begin_s])

    @property
    def ttfa_p95_s(self) -> float:
        """The 95th percentile of the times to first audio."""
        return percentile([each.ttfa_s for each in self.answers], 0.95)

    @property
    def silent(self) -> float:
        """Share of the answers in which the listener had to wait for the next piece."""
        return sum(each.silent_s > 0 for each in self.answers) / max(1, len(self.answers))


def simulate(
    times: Times, replicas: Replicas, speakers: Speakers, seconds: float | None = None, seed: int = 0
) -> Outcome:
    """Run one simulation; the same arguments give the same outcome."""
    env, chance = simpy.Environment(), random.Random(seed)  # noqa: S311 - no secret
    answers: list[Stream] = []
    stages = [[Replica(env, stage, times[stage]) for _ in range(replicas[stage])] for stage in STAGES]

    def speak(turns: Iterator[int]) -> Generator[simpy.Event, object, None]:
        if speakers.pause_s:
            # Somewhere in a conversation.
            yield env.timeout(chance.random() * (speakers.pause_s + speakers.workload.seconds))
        for _ in turns:
            stream = Stream(speakers.workload, env.now, env.event())
            stream.route = [min(each, key=lambda replica: len(replica.streams)) for each in stages]
            for replica in stream.route:
                replica.streams.append(stream)
                replica.wake()
            yield stream.end
            answers.append(stream)
            if speakers.total is None:
                yield env.timeout(max(0.0, stream.heard_until - env.now))
                yield env.timeout(chance.expovariate(1 / speakers.pause_s))

    turns = itertools.count() if speakers.total is None else iter(range(speakers.total))
    running = [env.process(speak(turns)) for _ in range(speakers.count)]
    env.run(until=env.all_of(running) if seconds is None else seconds)
    return Outcome(env.now, answers)


class Plan(NamedTuple):
    """Replicas that are enough, none if no number is; and what came of them, or of one of each a speaker."""

    speakers: int
    replicas: Replicas | None
    outcome: Outcome


def plans(times: Times, counts: Sequence[int], seconds: float = SECONDS) -> list[Plan]:
    """Find enough replicas for ascending numbers of speakers; each search begins with the one before."""
    found: list[Plan] = []

    def outcome(count: int, replicas: Replicas, seed: int = SEEDS[0]) -> Outcome:
        speakers = Speakers(count=count, workload=answer_of(ANSWER_S), pause_s=PAUSE_S)
        return simulate(times, replicas, speakers, WARM_S + seconds, seed).after(WARM_S)

    for count in counts:

        def enough(replicas: Replicas, count: int = count) -> bool:
            return all(reached(outcome(count, replicas, seed)) for seed in SEEDS)

        replicas = enlarged(enough, scaled(found, count) or dict.fromkeys(STAGES, 1), count)
        if replicas is not None and count <= SEARCHED:
            replicas = fewest(enough, replicas)
        found.append(Plan(count, replicas, outcome(count, replicas or dict.fromkeys(STAGES, count))))
        if replicas is None and count == 1:
            # Where one speaker cannot be served in time, no more can.
            break
    return found


def reached(outcome: Outcome) -> bool:
    """Whether the first audio came in time, and no listener ever waited for the next piece."""
    return bool(outcome.answers) and outcome.ttfa_p95_s < TTFA_S and outcome.silent == 0


def enlarged(enough: Callable[[Replicas], bool], replicas: Replicas, most: int) -> Replicas | None:
    """Add replicas of all stages until they are enough; none if even ``most`` of each are not."""
    while not enough(replicas):
        if min(replicas.values()) >= most:
            return None
        replicas = {stage: min(most, math.ceil(1.25 * count)) for stage, count in replicas.items()}
    return replicas


def fewest(enough: Callable[[Replicas], bool], replicas: Replicas) -> Replicas:
    """Take replicas away, a tenth of a stage at a time, until none can be spared."""
    taken = {stage: max(1, count // 10) for stage, count in replicas.items()}
    while taken:
        # The stage with the most replicas first.
        stage = max(taken, key=replicas.__getitem__)
        fewer = replicas | {stage: replicas[stage] - taken[stage]}
        if fewer[stage] > 0 and enough(fewer):
            replicas = fewer
        elif taken[stage] > 1:
            taken[stage] = 1
        else:
            del taken[stage]
    return replicas


def scaled(found: Sequence[Plan], count: int) -> Replicas | None:
    """Replicas for more speakers than were simulated: those of the largest plan, as often as needed."""
    for speakers, replicas, _ in reversed(found):
        if replicas:
            return {stage: math.ceil(count / speakers) * each for stage, each in replicas.items()}
    return None


def check(result: RunResult, times: Times) -> Iterator[tuple[int, dict[str, tuple[float, ...]]]]:
    """Simulate OmniRelay's loads of a run: by clients, both values of each figure."""
    loads = [each for each in result.loads if (each.adapter, each.scenario) == ("omnirelay", CONCURRENCY)]
    for clients in sorted({each.clients for each in loads}):
        ours = [each for each in loads if each.clients == clients]
        total = max(FEWEST, len(ours[0].answers) // clients * clients)
        speakers = Speakers(count=clients, workload=ours[0].workload, total=total)
        found = simulate(times, dict.fromkeys(STAGES, 1), speakers)
        answers = [answer for load in ours for answer in load.answers]
        both = (answers, found.answers)
        figures = {
            name: tuple(median(getattr(each, field) for each in its) for its in both)
            for name, field in CHECKED.items()
        }
        rate = (mean(load.requests_per_s for load in ours), len(found.answers) / found.seconds)
        silence = (mean(a.stalled_s for a in answers), mean(a.silent_s for a in found.answers))
        yield clients, figures | {"requests/s": rate, "silence an answer, s": silence}


def table_of_times(times: Mapping[str, Times]) -> Table:
    """The fitted step times."""
    rows: list[list[Cell]] = [
        [f"`{size}`", *(f"{1000 * each.step_s:.1f} + {1000 * each.unit_s:.2f} n" for each in fitted.values())]
        for size, fitted in times.items()
    ]
    return Table(title="Step times", columns=["ms of a step", *STAGES], rows=rows)


def table_of_checks(runs: Mapping[str, RunResult], times: Mapping[str, Times]) -> Table:
    """Measured and simulated figures."""
    rows: list[list[Cell]] = []
    for size, run in runs.items():
        for clients, figures in check(run, times[size]):
            cells = [
                f"{ours:.3g}; {found:.3g} ({found / ours - 1:+.0%})" if ours else f"{ours:.3g}; {found:.3g}"
                for ours, found in figures.values()
            ]
            rows.append([f"`{size}`", clients, *cells])
    return Table(title="Checked: measured; simulated", columns=["", "clients", *figures], rows=rows)


def table_of_plans(name: str, found: Sequence[Plan]) -> Table:
    """Replicas by speakers, simulated and scaled up from the largest plan."""
    rows: list[list[Cell]] = []
    for each in found:
        numbers = [f"{count:,}" for count in (each.replicas or {}).values()] or ["none"] * len(STAGES)
        heard = [f"{each.outcome.ttfa_p95_s:.2f} s", f"{each.outcome.silent:.0%}"]
        rows.append([f"{each.speakers:,}", *numbers, *(heard if each.outcome.answers else ("", ""))])
    for speakers in BEYOND:
        if speakers > found[-1].speakers and (replicas := scaled(found, speakers)):
            rows.append([f"{speakers:,}", *(f"{count:,}" for count in replicas.values()), "", ""])
    columns = ["speakers", *STAGES, "first audio, P95", "with silence"]
    title = f"`{name}`: first audio in {TTFA_S:g} s (P95) and no silence"
    return Table(title=title, columns=columns, rows=rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, check, plan, and write the tables; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES, help="measured checkpoints")
    parser.add_argument(
        "--speakers", type=int, nargs="+", default=(1, 4, 16, 64, 256), metavar="N", help="ascending"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    try:
        runs = {size: read(options.results / f"{size}.json") for size in options.sizes}
        times = {size: fit(run) for size, run in runs.items()}
    except (OmniRelayError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    tables = [table_of_times(times), table_of_checks(runs, times)]
    imagined = {f"{size} / {FASTER}": faster(times[size], FASTER) for size in times if size == "small"}
    for name, each in (times | imagined).items():
        tell(f"replicas for {name}")
        tables.append(table_of_plans(name, plans(each, options.speakers)))
    head = (
        "# Simulated stacks\n\nWhat the tables mean: [how far it goes](../../docs/scaling.md). "
        f"Speakers ask for answers of {ANSWER_S:g} s, with pauses of {PAUSE_S:g} s on average."
    )
    keep(options.out, "scaling", "\n\n".join([head, *map(str, tables)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

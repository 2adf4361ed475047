"""``python -m benchmarks.playback [SIZE]``: the playback clock on and off, where requests come one by one.

Requests come at random times (a Poisson process), whether those before have ended or not, and ask for speech
of different lengths.  Both ways get the same requests at the same times.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.adapters.omnirelay import Changes, OmniRelay
from benchmarks.measure.answer import Timing, timing
from benchmarks.measure.checkpoints import ensure
from benchmarks.measure.load import run_load
from benchmarks.measure.machine import this_machine
from benchmarks.measure.output import tell
from benchmarks.measure.results import mean, percentile
from benchmarks.measure.workload import answer_of
from omnirelay.errors import OmniRelayError

REQUESTS: Final = 24
LENGTHS_S: Final = (3.0, 6.0, 12.0, 20.0)
RATES: Final = {"small": (0.4, 0.6), "tiny": (0.6, 0.9)}
"""Requests a second: about 60 and 90% of what two cores serve."""
REPEATS: Final = 1
OFF: Final[Changes] = {"talker": {"playback_margin_s": 0.0}, "token2wav": {"playback_margin_s": 0.0}}
WAYS: Final[dict[str, Changes]] = {"on": {}, "off": OFF}


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of one load heard.

    Attributes:
        clock: Whether the playback clock was ``on`` or ``off``.
        rate: Requests a second.
        answers: Figures of each answer.
    """

    clock: str
    rate: float
    answers: list[Timing]


async def arrive(server: OmniRelay, rate: float, seed: int) -> list[Timing]:
    """Send requests at random times; gives the figures of their answers.

    Raises:
        OmniRelayError: A request failed.
    """
    generator = random.Random(seed)  # noqa: S311 - nothing secret
    asked: list[asyncio.Task[Timing]] = []

    async def ask(index: int, seconds: float) -> Timing:
        return timing(await server.answer(answer_of(seconds), index))

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                asked.append(group.create_task(ask(1000 * seed + number, generator.choice(LENGTHS_S))))
                await asyncio.sleep(generator.expovariate(rate))
    except* OmniRelayError as errors:
        raise OmniRelayError(f"a request failed: {errors.exceptions[0]}") from errors
    return [task.result() for task in asked]


async def measure(size: str) -> list[Heard]:
    """Let both ways serve the same requests, in turn."""
    model = await ensure(size)
    heard = []
    for repeat in range(REPEATS):
        for clock in list(WAYS)[:: 1 if repeat % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as directory:
                async with OmniRelay(model, Path(directory), WAYS[clock]) as server:
                    await run_load(server, answer_of(1.0), range(4), 4, scenario="warm-up")
                    for rate in RATES[size]:
                        answers = await arrive(server, rate, seed=repeat + 1)
                        heard.append(Heard(clock=clock, rate=rate, answers=answers))
                        tell(f"clock {clock}, {rate} requests/s: {row(heard[-1:])}")
    return heard


def row(loads: Sequence[Heard]) -> str:
    """The figures of some loads, as cells of a table."""
    answers = [answer for load in loads for answer in load.answers]
    heard = [answer.ttfa_s for answer in answers]
    cells = (
        f"{len(answers)}",
        f"{percentile(heard, 0.5):.2f}",
        f"{percentile(heard, 0.9):.2f}",
        f"{sum(answer.underruns for answer in answers) / len(answers):.2f}",
        f"{100 * sum(answer.underruns == 0 for answer in answers) / len(answers):.0f}%",
        f"{mean([answer.stalled_s for answer in answers]):.2f}",
        f"{mean([answer.completion_s for answer in answers]):.2f}",
    )
    return " | ".join(cells)


def table(size: str, heard: Sequence[Heard]) -> str:
    """All figures, in Markdown."""
    machine = this_machine()
    head = (
        *("requests/s", "clock", "n", "TTFA P50, s", "P90, s", "underruns an answer"),
        *("answers without", "silent s an answer", "completion, s"),
    )
    lines = [
        f"# {size}: the playback clock, requests that come at random times",
        "",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB.",
        f"{REQUESTS} requests a load, {REPEATS} loads each, "
        f"speech of {', '.join(f'{length:g}' for length in LENGTHS_S)} s.",
        "",
        f"| {' | '.join(head)} |",
        f"| {' | '.join(['---:'] * len(head))} |",
    ]
    for rate in RATES[size]:
        for clock in WAYS:
            same = [load for load in heard if (load.rate, load.clock) == (rate, clock)]
            lines.append(f"| {rate} | {clock} | {row(same)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "small"
    text = table(chosen, asyncio.run(measure(chosen)))
    Path("benchmarks/results", f"{chosen}-playback.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)

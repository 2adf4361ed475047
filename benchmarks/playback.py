"""``python -m benchmarks.playback [SIZE]``: what listeners hear, with the playback clock on and off.

First clients that ask again when they have their answer; then requests that come at random times (a Poisson
process), whether those before have ended or not.  They ask for speech of different lengths; both ways get the
same requests.
"""

import asyncio
import random
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

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
CLIENTS: Final = (1, 4, 8)
REPEATS: Final = 1
OFF: Final[Changes] = {"talker": {"playback_margin_s": 0.0}, "token2wav": {"playback_margin_s": 0.0}}
WAYS: Final[dict[str, Changes]] = {"on": {}, "off": OFF}


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of one load heard.

    Attributes:
        clock: Whether the playback clock was ``on`` or ``off``.
        load: How many clients, or how many requests a second.
        answers: Figures of each answer.
    """

    clock: str
    load: str
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
                    for load, answers in loads(server, size, repeat + 1):
                        heard.append(Heard(clock=clock, load=load, answers=await answers))
                        tell(f"clock {clock}, {load}: {row(heard[-1:])}")
    return heard


def loads(server: OmniRelay, size: str, seed: int) -> Iterator[tuple[str, Coroutine[Any, Any, list[Timing]]]]:
    """Each load's name, and what puts it on the server."""
    for clients in CLIENTS:
        yield f"{clients} client{'s' if clients > 1 else ''}", ask_again(server, clients, seed)
    for rate in RATES[size]:
        yield f"{rate} requests/s", arrive(server, rate, seed)


async def ask_again(server: OmniRelay, clients: int, seed: int) -> list[Timing]:
    """Let each client ask for speech of every length; gives the figures of their answers.

    Raises:
        OmniRelayError: A request failed.
    """

    async def ask(client: int) -> list[Timing]:
        lengths = random.Random(client).sample(LENGTHS_S, len(LENGTHS_S))  # noqa: S311 - nothing secret
        numbers = range(100_000 * seed + 100 * client, 100_000 * (seed + 1))
        found = zip(numbers, lengths, strict=False)
        return [timing(await server.answer(answer_of(seconds), number)) for number, seconds in found]

    return list(chain.from_iterable(await asyncio.gather(*map(ask, range(clients)))))


def row(loads: Sequence[Heard]) -> str:
    """The figures of some loads, as cells of a table."""
    answers = [answer for load in loads for answer in load.answers]
    heard = [answer.ttfa_s for answer in answers]
    cells = (
        f"{len(answers)}",
        f"{percentile(heard, 0.5):.2f}",
        f"{percentile(heard, 0.9):.2f}",
        f"{mean([answer.stalled_s for answer in answers]):.2f}",
        f"{percentile([answer.start_s for answer in answers], 0.5):.2f}",
        f"{percentile([answer.least_start_s for answer in answers], 0.5):.2f}",
        f"{mean([answer.stalled_after_delay_s for answer in answers]):.2f}",
        f"{100 * sum(answer.underruns_after_delay == 0 for answer in answers) / len(answers):.0f}%",
        f"{mean([answer.completion_s for answer in answers]):.2f}",
    )
    return " | ".join(cells)


def table(size: str, heard: Sequence[Heard]) -> str:
    """All figures, in Markdown."""
    machine = this_machine()
    head = (
        *("load", "clock", "n", "TTFA P50, s", "P90, s", "silent s an answer"),
        *("advised start P50, s", "least start P50, s"),
        *("silent s after the advised start", "answers without a gap", "completion, s"),
    )
    lines = [
        f"# {size}: what listeners hear",
        "",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB.",
        f"Speech of {', '.join(f'{length:g}' for length in LENGTHS_S)} s; {REQUESTS} requests that come at "
        "random times. The least start is the earliest after which nothing stops, known afterwards.",
        "",
        f"| {' | '.join(head)} |",
        f"| {' | '.join(['---:'] * len(head))} |",
    ]
    for load in dict.fromkeys(each.load for each in heard):
        for clock in WAYS:
            same = [each for each in heard if (each.load, each.clock) == (load, clock)]
            lines.append(f"| {load} | {clock} | {row(same)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "small"
    text = table(chosen, asyncio.run(measure(chosen)))
    Path("benchmarks/results", f"{chosen}-playback.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)

"""``python -m benchmarks.playback [SIZE] [--slower N]``: what listeners hear, playback clock on and off.

First clients that ask again when they have their answer; then requests that come at random times (a Poisson
process), whether those before have ended or not.  They ask for speech of different lengths; both ways get the
same requests.  ``--slower`` is for models that this machine computes more slowly than they speak: a second of
speech lasts so many seconds, and so does a second in the table.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain, count
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

REQUESTS: Final = 48
LENGTHS_S: Final = (3.0, 6.0, 12.0, 20.0)
SHARES: Final = (0.6, 0.7, 0.9)
"""Of the requests a second that most clients at once are answered."""
CLIENTS: Final = (1, 4, 8)
OFF: Final[Changes] = {"talker": {"playback_margin_s": 0.0}, "token2wav": {"playback_margin_s": 0.0}}
WAYS: Final[dict[str, Changes]] = {"on": {}, "off": OFF}


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of one load heard.

    Attributes:
        clock: Whether the playback clock was ``on`` or ``off``.
        load: How many clients ask at once, or how many requests come a second.
        answers: Figures of each answer.
    """

    clock: str
    load: str
    answers: list[Timing]


async def measure(size: str, slower: int, ways: Sequence[str]) -> list[Heard]:
    """Put the same loads on both ways, one after the other."""
    model = await ensure(size)
    heard: list[Heard] = []
    capacity = 0.0
    for clock in ways:
        with tempfile.TemporaryDirectory() as directory:
            async with OmniRelay(model, Path(directory), WAYS[clock], slower=slower) as server:
                await run_load(server, answer_of(1.0), range(4), 4, scenario="warm-up")
                listener = Listener(server)
                for clients in CLIENTS:
                    begun = time.monotonic()
                    answers = await listener.ask_again(clients)
                    heard.append(Heard(clock=clock, load=f"{clients} at once", answers=answers))
                    tell(row(heard[-1]))
                capacity = capacity or len(answers) / (time.monotonic() - begun)
                for share in SHARES:
                    answers = await listener.arrive(share * capacity)
                    load = f"{share:.0%}: {share * capacity:.2f}/s"
                    heard.append(Heard(clock=clock, load=load, answers=answers))
                    tell(row(heard[-1]))
    return heard


class Listener:
    """Asks a server, each time with another prompt, and times what is heard."""

    def __init__(self, server: OmniRelay) -> None:
        self._server = server
        self._numbers = count(1000)

    async def ask_again(self, clients: int) -> list[Timing]:
        """Let clients ask for speech of every length, each again when it has its answer.

        Raises:
            OmniRelayError: A request failed.
        """

        async def ask(client: int) -> list[Timing]:
            lengths = random.Random(client).sample(LENGTHS_S, len(LENGTHS_S))  # noqa: S311 - nothing secret
            return [await self._ask(seconds) for seconds in lengths]

        return list(chain.from_iterable(await asyncio.gather(*map(ask, range(clients)))))

    async def arrive(self, rate: float) -> list[Timing]:
        """Ask at random times, so many requests a second.

        Raises:
            OmniRelayError: A request failed.
        """
        generator = random.Random(1)  # noqa: S311 - nothing secret
        asked: list[asyncio.Task[Timing]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(REQUESTS):
                    asked.append(group.create_task(self._ask(generator.choice(LENGTHS_S))))
                    await asyncio.sleep(generator.expovariate(rate))
        except* OmniRelayError as errors:
            raise OmniRelayError(f"a request failed: {errors.exceptions[0]}") from errors
        return [task.result() for task in asked]

    async def _ask(self, seconds: float) -> Timing:
        return timing(await self._server.answer(answer_of(seconds), next(self._numbers)))


def row(heard: Heard) -> str:
    """The figures of a load, as cells of a table."""
    answers = heard.answers
    first = [answer.ttfa_s for answer in answers]
    cells = (
        f"{heard.load}",
        f"{heard.clock}",
        f"{len(answers)}",
        f"{percentile(first, 0.5):.2f}",
        f"{percentile(first, 0.9):.2f}",
        f"{mean([answer.stalled_s for answer in answers]):.2f}",
        f"{percentile([answer.start_s for answer in answers], 0.5):.2f}",
        f"{percentile([answer.least_start_s for answer in answers], 0.5):.2f}",
        f"{mean([answer.stalled_after_delay_s for answer in answers]):.2f}",
        f"{100 * sum(answer.underruns_after_delay == 0 for answer in answers) / len(answers):.0f}%",
        f"{mean([answer.completion_s for answer in answers]):.2f}",
    )
    return " | ".join(cells)


def table(size: str, slower: int, heard: Sequence[Heard]) -> str:
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
        *([f"A second of speech, and of this table, lasts {slower} seconds."] if slower > 1 else []),
        f"Speech of {', '.join(f'{length:g}' for length in LENGTHS_S)} s; {REQUESTS} requests that come at "
        "random times. The least start is the earliest after which nothing stops, known afterwards.",
        "",
        f"| {' | '.join(head)} |",
        f"| {' | '.join(['---:'] * len(head))} |",
    ]
    order = list(dict.fromkeys(each.load for each in heard))
    lines += [f"| {row(each)} |" for each in sorted(heard, key=lambda each: order.index(each.load))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.playback")
    parser.add_argument("size", nargs="?", default="small")
    parser.add_argument("--slower", type=int, default=1, metavar="N", help="a second lasts so many")
    parser.add_argument("--clock", nargs="+", choices=WAYS, default=list(WAYS), help="the playback clock")
    options = parser.parse_args()
    found = asyncio.run(measure(options.size, options.slower, options.clock))
    text = table(options.size, options.slower, found)
    name = f"{options.size}-slower{options.slower}" if options.slower > 1 else options.size
    Path("benchmarks/results", f"{name}-playback.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)

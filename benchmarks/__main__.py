"""``python -m benchmarks``: see ``--help``."""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.adapters.base import Adapter
from benchmarks.adapters.omnirelay import OmniRelay
from benchmarks.adapters.transformers import Transformers
from benchmarks.measure.checkpoints import QWEN3, SIZES, ensure, parameters
from benchmarks.measure.load import CONCURRENCY
from benchmarks.measure.machine import this_machine
from benchmarks.measure.results import RESULTS, Measured, RunResult, keep, tell
from benchmarks.measure.workload import Speech
from benchmarks.report import TITLES, report
from benchmarks.scenarios.alone import measure_floor, measure_synthesis
from benchmarks.scenarios.concurrency import Compared, Plan, choose_threads, concurrency, first_audio, warm_up
from benchmarks.scenarios.hops import measure_hops
from benchmarks.scenarios.listening import real_time
from benchmarks.scenarios.questions import questions
from omnirelay.errors import OmniRelayError
from shared.real_time import set_realtime_priority

SCENARIOS: Final = (CONCURRENCY, *TITLES)
SERVERS: Final = ("omnirelay", "transformers")
ALL: Final = ("concurrency", "first-audio", "hops", "synthesis", "floor")
DEFAULTS: Final = {"bench": ALL, "small": ALL[:2], "tiny": ALL[:1], QWEN3: [*ALL[:2], *ALL[3:]]}
PLANS: Final = {
    "bench": Plan(seconds=10.0, levels=[1, 4, 8, 16]),
    "small": Plan(seconds=10.0, levels=[1, 4, 8, 16]),
    QWEN3: Plan(seconds=10.0, levels=[1, 8]),
    "tiny": Plan(seconds=2.56, levels=[1, 4, 8], rounds=3, references=6),
}
QUICK: Final = Plan(seconds=0.6, levels=[1, 2], repeats=1, references=1, probes=1, long_s=6.0, short_s=1.0)


async def measure(size: str, plan: Plan, options: argparse.Namespace) -> RunResult:
    """Measure the scenarios that are asked for on one checkpoint.

    Raises:
        OmniRelayError: A server could not be started, or a request failed.
    """
    model = await ensure(size)
    plan = msgspec.structs.replace(plan, speech=Speech.of(model))
    scenarios = options.scenarios or (ALL if options.quick else DEFAULTS[size])
    result = RunResult(checkpoint=size, parameters=parameters(model) / 1e6, machine=this_machine())
    if {"concurrency", "first-audio"} & set(scenarios):
        result = await _served(result, model, scenarios, plan, options)
    for name in scenarios:
        if name not in ("concurrency", "first-audio"):
            tell(name)
            result.measured[name] = await _scenario(name, model, plan, options)
    return result


async def _served(
    result: RunResult, model: Path, scenarios: Sequence[str], plan: Plan, options: argparse.Namespace
) -> RunResult:
    compared, threads, loads = Compared(plan.workload), {}, []
    async with AsyncExitStack() as running:
        adapters: list[Adapter] = []
        if "omnirelay" in options.servers:
            changes = {"stages": {"token2wav": {"replicas": options.token2wav}}}
            adapters.append(await running.enter_async_context(OmniRelay(model, changes)))
        if "transformers" in options.servers:
            reference = await running.enter_async_context(Transformers(model))
            adapters.append(reference)
        await warm_up(adapters, plan)
        if "transformers" in options.servers:
            threads = await choose_threads(reference, plan)
        if "concurrency" in scenarios:
            loads = await concurrency(adapters, plan, compared)
        if "first-audio" in scenarios and "omnirelay" in options.servers:
            result.measured["first-audio"] = await first_audio(adapters[0], plan)
    return msgspec.structs.replace(
        result,
        reference_threads=threads,
        loads=loads,
        compared=compared.count,
        unequal=list(compared.unequal()),
    )


async def _scenario(name: str, model: Path, plan: Plan, options: argparse.Namespace) -> list[Measured]:
    quick, repeats = options.quick, options.repeats
    number, streams = 10 if quick else 200, (1.0, 2.0) if quick else (1.0, 10.0, 30.0, 120.0)
    asked = (0.0, 2.0) if quick else (0.0, 2.0, 10.0, 30.0)
    scenarios: dict[str, Callable[[], Awaitable[list[Measured]]]] = {
        "hops": lambda: asyncio.to_thread(measure_hops, number),
        "synthesis": lambda: asyncio.to_thread(measure_synthesis, model, streams, plan.repeats),
        "floor": lambda: asyncio.to_thread(measure_floor, model, number, plan.repeats),
        "real-time": lambda: real_time(1, 4) if quick else real_time(10),
        "questions": lambda: questions(model, asked, repeats or (1 if quick else 5), quick),
    }
    return await scenarios[name]()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; return the exit status, 1 if answers differ."""
    options = _parser().parse_args(arguments)
    if options.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    # The clients are here.  Theirs would be another machine, so they do not wait for servers that compute.
    set_realtime_priority()
    differ = False
    for size in options.size:
        plan = QUICK if options.quick else PLANS[size]
        given = {"seconds": options.seconds, "levels": options.clients, "repeats": options.repeats}
        plan = msgspec.structs.replace(plan, **{name: value for name, value in given.items() if value})
        try:
            result = asyncio.run(measure(size, plan, options))
        except (OmniRelayError, TimeoutError) as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
        others = [name for name in options.scenarios or () if name not in ALL]
        name = "-".join(filter(None, [options.name, size, *others]))
        keep(options.out, name, report(result), result)
        differ = differ or bool(result.unequal)
    if differ:
        sys.stderr.write("THE SERVERS' ANSWERS DIFFER: the figures compare different work\n")
    return 1 if differ else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure OmniRelay, by default beside transformers' own generate, on this machine.",
    )
    add = parser.add_argument
    add("--size", nargs="+", choices=[*SIZES, QWEN3], default=SIZES, help="checkpoints (default: all)")
    add("--scenarios", nargs="+", choices=SCENARIOS, help=f"default on bench: {', '.join(ALL)}")
    add("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    add("--seconds", type=float, help="speech of an answer (default: 10; 2.56 on tiny)")
    add("--clients", type=int, nargs="+", metavar="N", help="clients at once, one load each")
    add("--repeats", type=int, metavar="N", help="of everything (default: 2; questions 5)")
    add("--token2wav", type=int, default=1, metavar="N", help="replicas of token2wav (default: 1)")
    add("--cores", type=int, metavar="N", help="for all processes (default: all)")
    add("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    add("--name", default="", help="begins the names of the files written")
    add("--quick", action="store_true", help="a few short answers, to see that the harness works")
    return parser


if __name__ == "__main__":
    sys.exit(main())

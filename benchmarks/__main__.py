"""``python -m benchmarks``: see ``--help``."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.adapters.base import Adapter
from benchmarks.adapters.omnirelay import Changes, OmniRelay
from benchmarks.adapters.transformers import Transformers
from benchmarks.measure.checkpoints import SIZES, ensure, parameters
from benchmarks.measure.machine import this_machine
from benchmarks.measure.output import tell
from benchmarks.measure.results import RunResult, write
from benchmarks.parts.floor import measure_floor
from benchmarks.parts.hops import measure_hops
from benchmarks.parts.scenarios import Compared, Plan, choose_threads, concurrency, first_audio, warm_up
from benchmarks.parts.synthesis import measure_synthesis
from benchmarks.report.plots import draw
from benchmarks.report.tables import report
from omnirelay.errors import OmniRelayError
from shared.real_time import set_realtime_priority

RESULTS: Final = Path("benchmarks/results")
SCENARIOS: Final = ("concurrency", "first-audio", "hops", "synthesis", "floor")
SERVERS: Final = ("omnirelay", "transformers")
SECONDS: Final = {"bench": 10.0, "small": 10.0, "tiny": 2.56}
LEVELS: Final = {"bench": [1, 4, 8, 16], "small": [1, 4, 8, 16], "tiny": [1, 4, 8]}
ROUNDS: Final = {"bench": 1, "small": 1, "tiny": 3}
REFERENCES: Final = {"bench": 2, "small": 2, "tiny": 6}
ALONE_SCENARIOS: Final = {"bench": SCENARIOS, "small": SCENARIOS[:2], "tiny": SCENARIOS[:1]}
STREAMS_S: Final = (1.0, 10.0, 30.0, 120.0)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure on one checkpoint.

    Attributes:
        size: Which checkpoint.
        plan: How much.
        scenarios: Which of :data:`SCENARIOS`.
        servers: Which of :data:`SERVERS`.
        synthesizers: OmniRelay's replicas of token2wav.
        streams: Lengths of token2wav's streams, in seconds.
        hops: Messages of each kind.
        steps: Decoding steps measured beside bare vLLM.
    """

    size: str
    plan: Plan
    scenarios: Sequence[str]
    servers: Sequence[str]
    synthesizers: int = 1
    streams: Sequence[float] = STREAMS_S
    hops: int = 200
    steps: int = 200


async def measure(settings: RunSettings) -> RunResult:
    """Do one run on one checkpoint.

    Raises:
        OmniRelayError: A server could not be started, or a request failed.
    """
    model = await ensure(settings.size)
    machine = this_machine()
    plan = settings.plan
    compared = Compared(plan.workload)
    hops = await measure_hops(settings.hops) if "hops" in settings.scenarios else []
    synthesis = []
    if "synthesis" in settings.scenarios:
        tell("token2wav alone")
        synthesis = await measure_synthesis(model, settings.streams, plan.repeats)
    floor = []
    if "floor" in settings.scenarios:
        tell("the talker's steps and bare vLLM's")
        floor = await measure_floor(model, settings.steps, plan.repeats)
    loads, heard, threads = [], [], {}
    served = settings.servers if {"concurrency", "first-audio"} & set(settings.scenarios) else []
    async with AsyncExitStack() as running:
        directory = Path(running.enter_context(tempfile.TemporaryDirectory()))
        adapters: list[Adapter] = []
        changes: Changes = {"token2wav": {"replicas": settings.synthesizers}}
        if "omnirelay" in served:
            adapters.append(await running.enter_async_context(OmniRelay(model, directory, changes)))
        if "transformers" in served:
            reference = await running.enter_async_context(Transformers(model))
            adapters.append(reference)
        await warm_up(adapters, plan)
        if "transformers" in served:
            threads = await choose_threads(reference)
        if "concurrency" in settings.scenarios:
            loads = await concurrency(adapters, plan, compared)
        if "first-audio" in settings.scenarios and "omnirelay" in served:
            heard = await first_audio(adapters[0], plan)
    return RunResult(
        checkpoint=settings.size,
        parameters=parameters(model) / 1e6,
        machine=machine,
        reference_threads=threads,
        loads=loads,
        first_audio=heard,
        hops=hops,
        synthesis=synthesis,
        agreement=compared.agreement(),
        floor=floor,
    )


def keep(result: RunResult, directory: Path, name: str) -> None:
    """Write a run's figures, tables and pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    write(result, directory / f"{name}.json")
    (directory / f"{name}.md").write_text(report(result), encoding="utf-8")
    draw(result, directory, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for; return the exit status, 1 if answers differ."""
    options = _parser().parse_args(arguments)
    # The clients are here.  Theirs would be another machine, so they do not wait for servers that compute.
    set_realtime_priority()
    differ = False
    for size in options.size or SIZES:
        try:
            result = asyncio.run(measure(_settings(size, options)))
        except OmniRelayError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
        name = f"{options.name}-{size}" if options.name else size
        keep(result, options.out, name)
        sys.stdout.write(report(result) + "\n")
        tell(f"written: {options.out / name}.json, .md and pictures")
        differ = differ or bool(result.agreement.unequal)
    if differ:
        sys.stderr.write("THE SERVERS' ANSWERS DIFFER: the figures compare different work\n")
    return 1 if differ else 0


def _settings(size: str, options: argparse.Namespace) -> RunSettings:
    if options.quick:
        plan = Plan(
            seconds=options.seconds or 0.6,
            levels=options.clients or [1, 2],
            repeats=1,
            references=1,
            probes=1,
        )
        return RunSettings(
            size=size,
            plan=msgspec.structs.replace(plan, long_s=6.0, short_s=1.0),
            scenarios=options.scenarios or SCENARIOS,
            servers=options.servers,
            synthesizers=options.token2wav,
            streams=(1.0, 2.0),
            hops=10,
            steps=10,
        )
    plan = Plan(
        seconds=options.seconds or SECONDS[size],
        levels=options.clients or LEVELS[size],
        rounds=ROUNDS[size],
        repeats=options.repeats,
        references=REFERENCES[size],
    )
    scenarios = options.scenarios or ALONE_SCENARIOS[size]
    return RunSettings(
        size=size,
        plan=plan,
        scenarios=scenarios,
        servers=options.servers,
        synthesizers=options.token2wav,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure OmniRelay beside transformers' own generate, on this machine, in one run.",
    )
    parser.add_argument(
        "--size", action="append", choices=SIZES, help="checkpoint; may be given again (default: all)"
    )
    parser.add_argument("--seconds", type=float, help="speech of an answer (default: 10; 2.56 on tiny)")
    parser.add_argument("--clients", type=int, nargs="+", metavar="N", help="clients at once, one load each")
    parser.add_argument("--repeats", type=int, default=2, help="how often everything is done (default: 2)")
    parser.add_argument(
        "--scenarios", nargs="+", choices=SCENARIOS, help="what to measure (default: all on bench)"
    )
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument(
        "--token2wav", type=int, default=1, metavar="N", help="OmniRelay's replicas of token2wav (default: 1)"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    parser.add_argument("--name", default="", help="begins the names of the files written")
    parser.add_argument(
        "--quick", action="store_true", help="a few short answers, to see that the harness works"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

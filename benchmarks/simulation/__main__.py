"""``python -m benchmarks.simulation``: see ``--help``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.gateway.measure import GatewayResult
from benchmarks.measure.output import tell
from benchmarks.measure.results import read
from benchmarks.simulation.check import check
from benchmarks.simulation.plan import ANSWER_S, PAUSE_S, TTFA_S, plans
from benchmarks.simulation.report import draw, table_of_checks, table_of_plans, table_of_times
from benchmarks.simulation.step_times import fit
from omnirelay.errors import OmniRelayError

RESULTS: Final = Path("benchmarks/results")
SIZES: Final = ("tiny", "small", "bench")
SPEAKERS: Final = (1, 4, 16, 64, 256)
LATENCY_S: Final = 0.01
"""Added by a gateway to 99 of 100 events at most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, check, plan, and write the tables; return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        text = _run(options)
    except (OmniRelayError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    (options.out / "scaling.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    tell(f"written: {options.out / 'scaling.md'} and .png")
    return 0


def _run(options: argparse.Namespace) -> str:
    runs = {size: read(options.results / f"{size}.json") for size in options.sizes}
    times = {size: fit(run) for size, run in runs.items()}
    checks = {size: check(run, times[size]) for size, run in runs.items()}
    found = {}
    for size in options.sizes:
        tell(f"replicas for {size}")
        # Where one speaker cannot be served in time, no more can.
        alone = plans(times[size], options.speakers[:1])
        found[size] = plans(times[size], options.speakers) if alone[0].replicas else alone
    for size in options.faster:
        tell(f"replicas for {size}, {options.speedup:g} times as fast")
        found[f"{size} / {options.speedup:g}"] = plans(times[size].faster(options.speedup), options.speakers)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(found, options.out / "scaling.png")
    streams = streams_of_a_gateway(options.results / "gateway.json")
    parts = [
        "# Simulated stacks",
        "By `python -m benchmarks.simulation`; what it means: [how far it goes](../../docs/scaling.md).",
        "## Step times",
        table_of_times(times),
        "## Checked",
        table_of_checks(checks),
    ]
    for name, each in found.items():
        parts += [
            f"## `{name}`: first audio in {TTFA_S:g} s (P95), no silence",
            f"Answers of {ANSWER_S:g} s, pauses of {PAUSE_S:g} s on average.",
            table_of_plans(each, streams),
        ]
    return "\n\n".join([*parts, "![Replicas by speakers](scaling.png)"]) + "\n"


def streams_of_a_gateway(path: Path) -> int | None:
    """The most streams over TCP with which a measured gateway was quick enough; none if not measured."""
    if not path.is_file():
        return None
    measured = msgspec.json.decode(path.read_bytes(), type=GatewayResult)
    held = [
        each.streams for each in measured.streams if each.interface == "tcp" and each.every.p99 < LATENCY_S
    ]
    return max(held, default=None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation",
        description="Simulate stacks of many replicas with the step times of `python -m benchmarks`.",
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=SIZES, help="measured checkpoints")
    parser.add_argument(
        "--speakers", type=int, nargs="+", default=SPEAKERS, metavar="N", help="ascending numbers of speakers"
    )
    parser.add_argument(
        "--faster", nargs="*", choices=SIZES, default=["small"], help="simulated with shorter steps, too"
    )
    parser.add_argument("--speedup", type=float, default=4.0, metavar="X", help="of these steps (default: 4)")
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="DIR",
        help=f"of the measurements (default: {RESULTS})",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    return parser


if __name__ == "__main__":
    sys.exit(main())

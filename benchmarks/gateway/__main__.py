"""``python -m benchmarks.gateway``: see ``--help``."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.gateway.measure import GatewayResult, measure_replicas, measure_streams
from benchmarks.gateway.report import report
from benchmarks.gateway.sessions import measure_sessions
from benchmarks.measure.checkpoints import ensure
from benchmarks.measure.machine import this_machine
from benchmarks.measure.output import tell
from omnirelay.errors import OmniRelayError

RESULTS: Final = Path("benchmarks/results")
STREAMS: Final = (1, 100, 500, 1000, 2000, 4000)
REPLICAS: Final = (1, 32, 256)
SESSIONS: Final = (1, 16, 64)
HEARTBEATS_S: Final = (0.5, 5.0)
INTERFACES: Final = ("tcp", "http")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the tables; return the exit status, 1 if something could not be measured."""
    options = _parser().parse_args(arguments)
    machine = this_machine()
    streams, replicas, missed = [], [], []
    model = asyncio.run(ensure("tiny"))
    for interface in options.interfaces:
        for number in options.streams:
            tell(f"{interface}, {number} streams")
            try:
                streams.append(measure_streams(model, interface, number, options.seconds))
            except OmniRelayError as error:
                # Too much for this machine, perhaps; what was measured before is still worth a table.
                missed.append(f"{interface}, {number} streams: {error}")
                break
    for heartbeat_s, number in product(options.heartbeats, options.replicas):
        tell(f"{number} replicas of each stage, a heartbeat each {heartbeat_s:g} s")
        try:
            replicas.append(measure_replicas(model, number, heartbeat_s, options.seconds))
        except OmniRelayError as error:
            missed.append(f"{number} replicas of each stage: {error}")
    sessions = []
    for number in options.sessions:
        tell(f"{number} realtime sessions")
        sessions.append(measure_sessions(model, number, options.seconds))
    result = GatewayResult(
        machine=machine, streams=streams, replicas=replicas, sessions=sessions, missed=missed
    )
    name = f"{options.name}-gateway" if options.name else "gateway"
    text = report(result)
    options.out.mkdir(parents=True, exist_ok=True)
    figures = msgspec.json.format(msgspec.json.encode(result), indent=1)
    (options.out / f"{name}.json").write_bytes(figures + b"\n")
    (options.out / f"{name}.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    tell(f"written: {options.out / name}.json and .md")
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description="Measure the gateway alone, on one core, between imitated stages and light clients.",
    )
    parser.add_argument(
        "--streams", type=int, nargs="*", default=STREAMS, metavar="N", help="streams at once, one load each"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        nargs="*",
        default=REPLICAS,
        metavar="N",
        help="of each stage, without streams",
    )
    parser.add_argument(
        "--heartbeats", type=float, nargs="+", default=HEARTBEATS_S, metavar="S", help="their intervals"
    )
    parser.add_argument(
        "--sessions", type=int, nargs="*", default=SESSIONS, metavar="N", help="realtime ones, at most 64"
    )
    parser.add_argument("--interfaces", nargs="+", choices=INTERFACES, default=INTERFACES)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    parser.add_argument("--name", default="", help="begins the names of the files written")
    return parser


if __name__ == "__main__":
    sys.exit(main())

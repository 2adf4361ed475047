"""``python -m benchmarks.gateway``: see ``--help``."""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.gateway.measure import GatewayResult, Latency, measure_replicas, measure_streams
from benchmarks.gateway.stages import CODES, TEXT_S
from benchmarks.measure.checkpoints import ensure
from benchmarks.measure.machine import this_machine
from benchmarks.measure.results import RESULTS, Cell, Table, keep, page, tell
from omnirelay.errors import OmniRelayError

INTERFACES: Final = ("tcp", "http")


def measure(options: argparse.Namespace) -> GatewayResult:
    """Measure what is asked for; what the machine cannot hold is noted."""
    result = GatewayResult(machine=this_machine(), streams=[], replicas=[])
    model = asyncio.run(ensure("tiny"))
    for interface in options.interfaces:
        for number in options.streams:
            tell(f"{interface}, {number} streams")
            try:
                result.streams.append(measure_streams(model, interface, number, options.seconds))
            except OmniRelayError as error:
                result.missed.append(f"{interface}, {number} streams: {error}")
                break
    for heartbeat_s, number in product(options.heartbeats, options.replicas):
        tell(f"{number} replicas of each stage, a heartbeat each {heartbeat_s:g} s")
        try:
            result.replicas.append(measure_replicas(model, number, heartbeat_s, options.seconds))
        except OmniRelayError as error:
            result.missed.append(f"{number} replicas of each stage: {error}")
    return result


def report(result: GatewayResult) -> str:
    """All figures of a run, in Markdown."""
    pace = (
        "No model; the gateway has one core. Each stream has a connection and the pace of a speaker: "
        f"a text token each {TEXT_S} s, {CODES} codec tokens each {CODES / 50} s, and chunks of audio of "
        "0.24, 0.48, 0.96, and then 1.92 s. Latency: from before a stage sends until the client has read."
    )
    parts: list[object] = [pace, *_tables(result)]
    if result.missed:
        parts.append("\n".join(["Not held:", "", *(f"- {each}" for each in result.missed)]))
    return page("The gateway alone", result.machine, parts)


def _tables(result: GatewayResult) -> Iterator[Table]:
    streams: list[list[Cell]] = [
        [
            *(each.interface, f"{each.streams:,}", each.events_per_s, f"{each.cpu:.1%}"),
            *(each.cpu_us_per_event, each.bytes_per_stream / 1024, _ms(each.text), _ms(each.audio)),
            f"{1000 * each.every.p99:.1f}, {1000 * each.every.most:.1f}",
            *(f"{each.stages_cpu:.0%}", f"{each.others_cpu:.0%}"),
        ]
        for each in result.streams
    ]
    columns = [
        *("", "streams", "events/s", "gateway's core", "µs an event", "KiB a stream", "text P50, P99, ms"),
        *("audio P50, P99, ms", "all P99, longest, ms", "stages' core", "others' CPU"),
    ]
    replicas: list[list[Cell]] = [
        [
            *(each.replicas, f"{each.heartbeat_s:g} s", f"{each.cpu:.2%}", f"{each.loop_cpu:.2%}"),
            each.resident_bytes / 2**20,
        ]
        for each in result.replicas
    ]
    core = ("gateway's core", "of it the event loop")
    for title, head, rows in (
        ("Streams", columns, streams),
        ("Replicas", ["of each stage", "heartbeats each", *core, "resident memory, MiB"], replicas),
    ):
        if rows:
            yield Table(title=title, columns=head, rows=rows)


def _ms(latency: Latency) -> str:
    return f"{1000 * latency.p50:.1f}, {1000 * latency.p99:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the tables; return the exit status, 1 if something could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway",
        description="Measure the gateway alone, on one core, between imitated stages and light clients.",
    )
    add = parser.add_argument
    add(
        "--streams", type=int, nargs="*", default=(1, 100, 500, 1000, 2000, 4000), metavar="N", help="at once"
    )
    add("--replicas", type=int, nargs="*", default=(1, 32, 256), metavar="N", help="of each stage")
    add("--heartbeats", type=float, nargs="+", default=(0.5, 5.0), metavar="S", help="their intervals")
    add("--interfaces", nargs="+", choices=INTERFACES, default=INTERFACES)
    add("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    add("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    add("--name", default="", help="begins the names of the files written")
    options = parser.parse_args(arguments)
    result = measure(options)
    keep(options.out, f"{options.name}-gateway" if options.name else "gateway", report(result), result)
    return 1 if result.missed else 0


if __name__ == "__main__":
    sys.exit(main())

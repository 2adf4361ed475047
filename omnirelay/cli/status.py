"""``omnirelay status``: stages, their health, requests by state."""

import argparse
import asyncio
from collections.abc import Iterable, Sequence

import msgspec

from omnirelay.cli.output import columns, mebibytes, say, wrapped
from omnirelay.cli.target import target_of
from omnirelay.status import StatusReport


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        GatewayUnreachableError: No gateway answers.
    """
    report = asyncio.run(target_of(arguments).status())
    if arguments.json:
        say(msgspec.json.encode(report).decode())
    else:
        say(describe(report))
    return 0


def describe(report: StatusReport) -> str:
    """Format the report as tables."""
    gateway = report.gateway
    head = ("process", "state", "pid", "heartbeat", "running", "waiting", "peak memory")
    rows = [("gateway", "ready", str(gateway.pid), "-", "-", "-", mebibytes(gateway.peak_memory_bytes))]
    for stage in report.stages:
        known = stage.pid is not None
        age = "-" if stage.heartbeat_age_s is None else f"{stage.heartbeat_age_s:.1f} s ago"
        load = (str(stage.load.running), str(stage.load.waiting)) if known else ("-", "-")
        peak = mebibytes(stage.peak_memory_bytes) if known else "-"
        rows.append((stage.name, stage.state, str(stage.pid or "-"), age, *load, peak))
    requests = ((state, str(number)) for state, number in report.requests.items())
    refused = sum(report.refused.values())
    return "\n".join(
        [
            f"model: {gateway.model}{', text only' if gateway.text_only else ''}",
            wrapped(
                f"up for {gateway.uptime_s:.0f} s; {refused} messages refused, "
                f"{report.dropped_events} late events dropped, {report.resumes} requests resumed"
            ),
            "",
            *_table([head, *rows]),
            "",
            *_table([("requests", ""), *requests]),
        ]
    )


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if sum(widths) + 2 * len(widths) - 2 > columns():
        head, *below = cells
        return [
            cell if name == head[0] else f"  {name}: {cell}"
            for row in below
            for name, cell in zip(head, row, strict=True)
        ]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]

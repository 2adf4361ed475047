"""``omnirelay status``: stages, their health, requests by state."""

import argparse
import asyncio

import msgspec

from omnirelay.cli.output import mebibytes, say, table, wrapped
from omnirelay.cli.target import target_of
from omnirelay.status import StatusReport


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand.

    Raises:
        GatewayUnreachableError: No gateway answers.
    """
    report = asyncio.run(target_of(arguments).status())
    say(msgspec.json.encode(report).decode() if arguments.json else describe(report))
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
                f"version {gateway.version or 'unknown'}, up for {gateway.uptime_s:.0f} s; "
                f"{refused} messages refused, {report.dropped_events} late events dropped, "
                f"{report.resumes} requests resumed"
            ),
            "",
            *table([head, *rows]),
            "",
            *table([("requests", ""), *requests]),
        ]
    )

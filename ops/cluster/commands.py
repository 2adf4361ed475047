"""``omnirelay cluster``: up, status, scale, down."""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from math import inf
from types import MappingProxyType
from typing import Final

import msgspec
import yaml

from omnirelay.cli.output import say, table
from omnirelay.cli.progress import ProgressLine
from omnirelay.errors import ClusterError, StageStartError
from ops.child import last_words
from ops.cluster import keys, plan
from ops.cluster.connection import Cluster, connected
from ops.cluster.members import Member
from shared.config import Config, load_config
from shared.messages import Role

POLL_S: Final = 0.5
MOST_RESTARTS: Final = 3
"""Of a process before it was ready; then ``up`` gives up."""


def up(arguments: argparse.Namespace) -> int:
    """Start the stack and wait until it is ready.

    Raises:
        OmniRelayError: The configuration does not fit a cluster, there is no cluster, or it already has a
            stack; or a process ends repeatedly before it is ready, and then all are stopped.
    """
    config = load_config(arguments.config)
    plan.check(config)
    files = keys.gather(config)
    with connected(arguments.address) as cluster:
        cluster.create(plan.settings_text(config), files)
        try:
            members = _wait(cluster, plan.numbers_of(config))
        except (StageStartError, KeyboardInterrupt):
            say("stopping ...")
            cluster.stop()
            raise
    say(f"ready: {', '.join(clients(members))}")
    return 0


def status(arguments: argparse.Namespace) -> int:
    """Show every process.

    Raises:
        OmniRelayError: There is no stack, or no cluster.
    """
    # Ray writes of lost nodes to standard output, which may be read as JSON.
    with redirect_stdout(sys.stderr), connected(arguments.address) as cluster:
        members = cluster.call("members")
    say(msgspec.json.encode(members).decode() if arguments.json else describe(members))
    return 0


def scale(arguments: argparse.Namespace) -> int:
    """Change numbers of processes, and wait until they are.

    Raises:
        OmniRelayError: There is no stack or no cluster, or the stack cannot have such a process.
    """
    numbers: dict[Role, int] = dict(arguments.numbers)
    with connected(arguments.address) as cluster:
        config = Config.model_validate(yaml.safe_load(cluster.call("settings")) or {})
        absent = numbers.keys() - {"gateway", *config.served_stages}
        if absent:
            raise ClusterError(f"the stack has no {', '.join(sorted(absent))}: it was started with text_only")
        if "gateway" in numbers:
            plan.with_gateways(config, numbers["gateway"])
        # A process that is being started again may have ended often in its life.
        before = {
            each.name: each.placed.report.restarts if each.placed is not None else inf
            for each in cluster.call("members")
        }
        cluster.call("scale", numbers)
        members = _wait(cluster, numbers, before)
    for kind, number in numbers.items():
        say(f"{kind}: {number} ready")
    if "gateway" in numbers:
        say(f"clients: {', '.join(clients(members))}")
    return 0


def down(arguments: argparse.Namespace) -> int:
    """Finish all requests and stop every process.

    Raises:
        OmniRelayError: There is no stack, or no cluster.
    """
    with connected(arguments.address) as cluster:
        cluster.stop()
    say("stopped")
    return 0


def clients(members: Sequence[Member]) -> list[str]:
    """Where clients reach the gateways, in order."""
    return [address for each in members if each.placed is not None for address in each.placed.clients]


def _wait(
    cluster: Cluster, numbers: Mapping[Role, int], before: Mapping[str, float] = MappingProxyType({})
) -> list[Member]:
    """Wait until there are so many ready processes, and none that drain.

    Args:
        cluster: Where.
        numbers: By kind.
        before: How often each had ended that was there before.

    Raises:
        StageStartError: A process ends repeatedly before it is ready.
    """
    waits = ["the controller"]
    shown: list[str] = []
    with ProgressLine(lambda: f"waiting for {', '.join(waits)}") as progress:
        while True:
            members = cluster.call("members")
            waits[:] = waiting_for(members, numbers)
            if not waits:
                return members
            if waits != shown and not progress.visible:
                say(f"waiting for {', '.join(waits)}")
                shown = list(waits)
            check(members, before)
            time.sleep(POLL_S)


def waiting_for(members: Sequence[Member], numbers: Mapping[Role, int]) -> list[str]:
    """What is missing until a stack has a ready gateway and these numbers of ready processes."""
    missing = [
        f"{member.name} (no node with free resources yet)" if member.placed is None else member.name
        for member in members
        if not member.draining and not member.ready and (member.kind == "gateway" or member.kind in numbers)
    ]
    missing += [
        f"the end of {member.name}" for member in members if member.draining and member.kind in numbers
    ]
    ready = Counter(member.kind for member in members if member.ready and not member.draining)
    if not missing:
        missing += [kind for kind, number in numbers.items() if ready[kind] < number]
    return missing or ([] if ready["gateway"] else ["the gateway"])


def check(members: Sequence[Member], before: Mapping[str, float] = MappingProxyType({})) -> None:
    """Check that no process ends repeatedly before it is ready.

    Raises:
        StageStartError: One does; the message has its last lines.
    """
    for member in members:
        report = None if member.placed is None else member.placed.report
        if report is None or member.ready:
            continue
        if report.restarts - before.get(member.name, 0) >= MOST_RESTARTS:
            raise StageStartError(last_words(member.name, f"{report.ending} again and again", report.tail))


def describe(members: Sequence[Member]) -> str:
    """A table of the processes, and where clients reach each gateway."""
    head = ("process", "state", "node", "pid", "restarts", "requests")
    reached = [f"{each.name}: {', '.join(clients([each]))}" for each in members if clients([each])]
    return "\n".join([*table([head, *(_row(member) for member in members)]), *reached])


def _row(member: Member) -> tuple[str, ...]:
    state = "draining" if member.draining else "ready" if member.ready else "starting"
    if member.placed is None:
        return member.name, "waits for a node", "-", "-", "-", "-"
    report = member.placed.report
    where = f"{member.placed.host} {member.placed.node[:8]}"
    return member.name, state, where, str(report.pid or "-"), str(report.restarts), str(member.requests)

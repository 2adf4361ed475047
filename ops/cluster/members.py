"""The processes of a stack on a cluster, as their actors and the gateways report them; without Ray."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from omnirelay import StatusReport
from ops.cluster.autoscaling import StageSample
from ops.cluster.plan import Kind
from shared.messages import StageName

State = Literal["waiting", "running", "stopping"]
"""Of a process: not started for want of a gateway, running, being ended."""


@dataclass(frozen=True)
class Report:
    """What is known of a process.

    Attributes:
        state: What it does.
        pid: Its id; None before it was started.
        restarts: How often Ray has restarted it because it ended.
        ending: How it ended the last time, in words; empty before.
        tail: Its last lines of output before that end.
    """

    state: State
    pid: int | None
    restarts: int = 0
    ending: str = ""
    tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """A process and where it is.

    Attributes:
        name: The actor's.
        kind: The process.
        node: Ray's id of its node.
        host: The node's address.
        report: The process itself.
        clients: Of a gateway, where clients reach it.
    """

    name: str
    kind: Kind
    node: str
    host: str
    report: Report
    clients: tuple[str, ...] = ()


@dataclass(frozen=True)
class Member:
    """A process of the stack, as all know it.

    Attributes:
        name: Its actor's.
        kind: The process.
        draining: It is being ended.
        placed: Where it is; None while Ray looks for a node, or its node does not answer.
        ready: All gateways that answer have it as ready; a gateway is, when it answers.
        requests: Those running and waiting there, of a stage.
    """

    name: str
    kind: Kind
    draining: bool
    placed: Placed | None
    ready: bool
    requests: int


def member(
    name: str, kind: Kind, draining: bool, placed: Placed | None, statuses: Mapping[str, StatusReport]
) -> Member:
    """Join what is known of a process.

    Args:
        name: Its actor's.
        kind: The process.
        draining: It is being ended.
        placed: What its actor tells; None without an answer.
        statuses: What the gateways tell, by their actors' names, of those that answer.
    """
    if placed is None:
        return Member(name, kind, draining, None, ready=False, requests=0)
    if kind == "gateway":
        status = statuses.get(name)
        ready = status is not None and status.gateway.pid == placed.report.pid
        return Member(name, kind, draining, placed, ready, requests=0)
    found = [_at_gateway(placed, status) for status in statuses.values()]
    ready = bool(found) and all(each for each, _ in found)
    # Each stage reports the requests of all gateways.
    return Member(name, kind, draining, placed, ready, max((each for _, each in found), default=0))


def _at_gateway(placed: Placed, status: StatusReport) -> tuple[bool, int]:
    """Whether a gateway has a stage's process as ready, and its requests; another node's may have its id."""
    for stage in status.stages:
        host = (stage.inbox or "").removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if (stage.name, stage.pid, host) == (placed.kind, placed.report.pid, placed.host):
            return stage.state == "ready", stage.load.running + stage.load.waiting
    return False, 0


def sample_of(stage: StageName, members: Sequence[Member]) -> StageSample:
    """A stage as the rule of scaling sees it."""
    ours = [each for each in members if each.kind == stage and not each.draining]
    return StageSample(len(ours), sum(each.ready for each in ours), sum(each.requests for each in ours))

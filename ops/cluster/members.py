"""The processes of a stack on a cluster, as supervisors and gateway tell of them; nothing here needs Ray."""

from collections.abc import Sequence
from dataclasses import dataclass

from omnirelay import StatusReport
from ops.cluster.autoscaling import StageLook
from ops.cluster.plan import Kind
from ops.cluster.supervisor import Report
from shared.messages import StageName


@dataclass(frozen=True)
class Placed:
    """A process and where it is.

    Attributes:
        name: The actor's.
        kind: The process.
        node: Ray's id of its node.
        host: The node's address.
        report: The process itself.
    """

    name: str
    kind: Kind
    node: str
    host: str
    report: Report


@dataclass(frozen=True)
class Member:
    """A process of the stack, as all know it.

    Attributes:
        name: Its actor's.
        kind: The process.
        draining: It was told to go.
        placed: Where it is; None while Ray looks for a node, or its node does not answer.
        ready: The gateway has it as ready; a gateway is, when it answers.
        requests: Those running and waiting there, of a stage.
    """

    name: str
    kind: Kind
    draining: bool
    placed: Placed | None
    ready: bool
    requests: int


def member(
    name: str, kind: Kind, draining: bool, placed: Placed | None, status: StatusReport | None
) -> Member:
    """Join what is known of a process.

    Args:
        name: Its actor's.
        kind: The process.
        draining: It was told to go.
        placed: What its actor tells; None without an answer.
        status: What the gateway tells; None without an answer.
    """
    ready, requests = False, 0
    if placed is not None and status is not None:
        ready, requests = _at_gateway(placed, status)
    return Member(name, kind, draining, placed, ready, requests)


def _at_gateway(placed: Placed, status: StatusReport) -> tuple[bool, int]:
    """Whether a process is ready, and its requests; process ids alone may be those of another node's."""
    if placed.kind == "gateway":
        return status.gateway.pid == placed.report.pid, 0
    for stage in status.stages:
        host = (stage.inbox or "").removeprefix("tcp://").rpartition(":")[0].strip("[]")
        if (stage.name, stage.pid, host) == (placed.kind, placed.report.pid, placed.host):
            return stage.state == "ready", stage.load.running + stage.load.waiting
    return False, 0


def look_at(stage: StageName, members: Sequence[Member]) -> StageLook:
    """A stage as the rule of scaling sees it."""
    ours = [each for each in members if each.kind == stage and not each.draining]
    return StageLook(len(ours), sum(each.ready for each in ours), sum(each.requests for each in ours))

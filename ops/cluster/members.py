"""The processes of a stack on a cluster, as their actors and the gateways report them; without Ray."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from omnirelay import StatusReport
from omnirelay.errors import GatewayUnreachableError, MessageError
from ops.cluster.autoscaling import StageSample
from ops.target import probe_target
from shared.config import Config
from shared.messages import Role, StageName

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
    kind: Role
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
    kind: Role
    draining: bool
    placed: Placed | None
    ready: bool
    requests: int


def member(
    name: str, kind: Role, draining: bool, placed: Placed | None, statuses: Mapping[str, StatusReport]
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


UNDERRUNS: Final = "omnirelay_playback_underruns_total"
TIMEOUT_S: Final = 5.0
MAX_METRICS_BYTES: Final = 2**24


@dataclass(frozen=True)
class GatewayReport:
    """What a gateway tells at one moment.

    Attributes:
        status: Its stages and requests.
        underruns: Gaps in playback since its start; 0 without ``gateway.monitor``.
    """

    status: StatusReport
    underruns: int


async def ask(config: Config, number: int) -> GatewayReport | None:
    """Ask the gateway of a number, on this node; None while it does not answer."""
    with suppress(GatewayUnreachableError, MessageError, aiohttp.ClientError, TimeoutError):
        status = await probe_target(config, number).status()
        return GatewayReport(status, await _underruns(config.gateway.own_addresses(number)["monitor"]))
    return None


async def _underruns(monitor: str | None) -> int:
    if monitor is None:
        return 0
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{monitor.replace('tcp:', 'http:', 1)}/metrics") as response,
    ):
        text = (await response.content.read(MAX_METRICS_BYTES)).decode()
    return read_underruns(text)


def read_underruns(exposition: str) -> int:
    """The counter in a gateway's metrics; 0 where it is absent."""
    samples = (sample for family in text_string_to_metric_families(exposition) for sample in family.samples)
    return int(next((sample.value for sample in samples if sample.name == UNDERRUNS), 0))

"""Metrics of every stage."""

from collections.abc import Iterator
from typing import Any, Final, get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from omnirelay.errors import BusyError, QueueFullError, StageFailedError
from shared.messages import Heartbeat
from shared.metrics import by_reason, counter, gauge, histogram
from shared.stage.loop import DropReason, StageLoop
from shared.stage.membership import Membership
from shared.stage.service import StageService

_OWN_FAULTS: Final = (StageFailedError, QueueFullError, BusyError)
"""Failures caused by the stack rather than the request."""


class StageMetrics(Collector):
    """Metrics of a stage's loop, heartbeats and service.

    The loop's load comes from its last report, so that no other thread reads the state of a running step.
    """

    def __init__(self, service: StageService[Any], loop: StageLoop[Any], membership: Membership) -> None:
        self._service = service
        self._loop = loop
        self._membership = membership
        self._labels: Final = {"stage": service.name}

    def collect(self) -> Iterator[Metric]:
        """All metrics of the stage."""
        report = self._loop.report
        if report is not None:
            yield from self._of_report(report)
        yield histogram(
            "omnirelay_stage_step_seconds",
            "Duration of an engine's step and of sending its output.",
            [(self._labels, self._loop.step_seconds)],
        )
        yield counter(
            "omnirelay_stage_seconds_total",
            "The loop's time by `activity`; `wait`: for work or a slow receiver; `model`: forward passes (on "
            "a GPU their launches; nothing with tensor parallelism); `engine`: the rest of a step.",
            [
                ({**self._labels, "activity": activity}, seconds)
                for activity, seconds in self._loop.seconds.items()
            ],
        )
        yield counter(
            "omnirelay_stage_failures_total",
            "Requests that failed in this stage; `reason` is an error code.",
            by_reason(self._labels, self._loop.failures, *(error.code for error in _OWN_FAULTS)),
        )
        yield counter(
            "omnirelay_stage_drops_total",
            "Requests dropped early: `reason` is `aborted` by the gateway, or `orphaned` by its loss.",
            by_reason(self._labels, self._loop.drops, *get_args(DropReason)),
        )
        yield counter(
            "omnirelay_heartbeats_sent_total",
            "Heartbeats sent, to all gateways together.",
            [(self._labels, self._membership.queues.beats[0])],
        )
        yield counter(
            "omnirelay_heartbeats_sent_late_total",
            "Heartbeats more than an interval late: the machine is overloaded.",
            [(self._labels, self._membership.queues.beats[1])],
        )
        yield gauge(
            "omnirelay_stage_gateways",
            "Gateways whose requests the stage takes.",
            [(self._labels, len(self._membership.joined))],
        )
        yield from self._service.collect()

    def _of_report(self, report: Heartbeat) -> Iterator[Metric]:
        yield gauge(
            "omnirelay_stage_info",
            "Always 1; `instance_id` is random per process.",
            [({**self._labels, "instance_id": report.instance}, 1)],
        )
        yield gauge(
            "omnirelay_stage_requests",
            "Requests by `state`: in the engine's batch, or waiting for memory, rows, tokens or media.",
            [
                ({**self._labels, "state": "running"}, report.load.running),
                ({**self._labels, "state": "waiting"}, report.load.waiting),
            ],
        )
        yield gauge(
            "omnirelay_stage_held_bytes",
            "Bytes held for requests: prepared media (thinker), conditioning rows (talker).",
            [(self._labels, report.load.held_bytes)],
        )

"""What every stage tells Prometheus, whatever it computes."""

from collections.abc import Iterator
from typing import Any, Final, get_args

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from omnirelay.errors import BusyError, QueueFullError, StageFailedError
from shared.messages import Heartbeat
from shared.metrics import by_reason, counter, gauge, histogram
from shared.stage.heartbeat import HeartbeatThread
from shared.stage.loop import DropReason, StageLoop
from shared.stage.service import StageService

_OWN_FAULTS: Final = (StageFailedError, QueueFullError, BusyError)
"""Failures that say something of the stack rather than of the request."""


class StageMetrics(Collector):
    """A stage's loop, its heartbeats, and what its service adds.

    What the loop holds is taken from its last report for a heartbeat, so that nothing of a running step is
    looked at from another thread.

    Args:
        service: The stage's work.
        loop: Its loop.
        heart: Its heartbeats.
    """

    def __init__(self, service: StageService[Any], loop: StageLoop[Any], heart: HeartbeatThread) -> None:
        self._service = service
        self._loop = loop
        self._heart = heart
        self._labels: Final = {"stage": service.name}

    def collect(self) -> Iterator[Metric]:
        """All metrics of the stage."""
        report = self._heart.report
        if report is not None:
            yield from self._of_report(report)
        yield histogram(
            "omnirelay_stage_step_seconds",
            "Duration of a step of the stage's loop: one step of the engine, and sending what came out.",
            [(self._labels, self._loop.step_seconds)],
        )
        yield counter(
            "omnirelay_stage_seconds_total",
            "What the loop's time went to: wait for something to do, take messages, compute the model, "
            "what the engine does around it, send.",
            [
                ({**self._labels, "activity": activity}, seconds)
                for activity, seconds in self._loop.seconds.items()
            ],
        )
        yield counter(
            "omnirelay_stage_failures_total",
            "Requests that failed in this stage, by error code.",
            by_reason(self._labels, self._loop.failures, *(error.code for error in _OWN_FAULTS)),
        )
        yield counter(
            "omnirelay_stage_drops_total",
            "Requests that were dropped here before their end, because the gateway said so or was gone.",
            by_reason(self._labels, self._loop.drops, *get_args(DropReason)),
        )
        yield counter(
            "omnirelay_heartbeats_sent_total",
            "Heartbeats sent; none is sent while the gateway is not there.",
            [(self._labels, self._heart.sent)],
        )
        yield counter(
            "omnirelay_heartbeats_sent_late_total",
            "Heartbeats that came more than an interval late, because their thread did not get to run.",
            [(self._labels, self._heart.late)],
        )
        yield from self._service.collect()

    def _of_report(self, report: Heartbeat) -> Iterator[Metric]:
        yield gauge(
            "omnirelay_stage_info",
            "Always 1; a process draws its id when it starts.",
            [({**self._labels, "instance_id": report.instance}, 1)],
        )
        yield gauge(
            "omnirelay_stage_requests",
            "Requests in the engine's batch, and those that wait for memory, rows, tokens or media.",
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

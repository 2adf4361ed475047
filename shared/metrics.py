"""What the processes tell Prometheus, as far as several of them do, and what it is made of.

State lives with its owner, as plain numbers that one thread writes; it is read when it is asked for, by
another thread.  So a message or a step costs an addition or two and no lock.  All names begin with
``omnirelay_``; docs/metrics.md lists them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shared.errors import MessageError, PayloadError, RepeatedMessageError, SequenceError, VersionError
from shared.log import dropped_lines

if TYPE_CHECKING:
    from shared.peers import Outgoing
    from shared.queues import PullQueue

Labels = Mapping[str, str]

CODEC_BUCKETS: Final = (3e-6, 1e-5, 3e-5, 1e-4, 1e-3, 1e-2)
"""Seconds of encoding or decoding a message."""
WAIT_BUCKETS: Final = (0.001, 0.01, 0.1, 1.0, 10.0)
"""Seconds that a message waits for its receiver."""
_REFUSALS: Final = (MessageError, VersionError, PayloadError, SequenceError, RepeatedMessageError)

# A time stamp of its own for each counter would double what is scraped; Prometheus sees a restart without.
disable_created_metrics()


class Distribution:
    """How many values fell into each bucket, and their sum.

    It has one writer and no lock, which makes it several times cheaper than prometheus_client's histogram.

    Args:
        bounds: Upper bounds of the buckets, ascending; what is above the last has a bucket of its own.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Traffic:
    """What went through one end of an edge.

    Attributes:
        messages: Their number.
        bytes: Of all their frames.
        codec_seconds: How long each took to be encoded or decoded.
    """

    __slots__ = ("bytes", "codec_seconds", "messages")

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.codec_seconds = Distribution(CODEC_BUCKETS)


def counter(name: str, text: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    """A counter, ready to be scraped.

    Args:
        name: With ``_total`` at its end.
        text: What it counts.
        values: One for each combination of labels; all have the same labels.
    """
    family = CounterMetricFamily(name, text)
    for labels, value in values:
        family.add_sample(name, dict(labels), value)
    return family


def gauge(name: str, text: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    """A gauge, ready to be scraped; as :func:`counter`."""
    family = GaugeMetricFamily(name, text)
    for labels, value in values:
        family.add_sample(name, dict(labels), value)
    return family


def histogram(name: str, text: str, values: Iterable[tuple[Labels, Distribution]]) -> Metric:
    """A histogram, ready to be scraped; as :func:`counter`."""
    family = HistogramMetricFamily(name, text)
    for labels, distribution in values:
        total = distribution.total
        counts = list(accumulate(tuple(distribution.counts)))
        for bound, count in zip((*distribution.bounds, float("inf")), counts, strict=True):
            family.add_sample(f"{name}_bucket", {**labels, "le": floatToGoString(bound)}, count)
        family.add_sample(f"{name}_count", dict(labels), counts[-1])
        family.add_sample(f"{name}_sum", dict(labels), total)
    return family


def by_reason(labels: Labels, counts: Mapping[str, int], *expected: str) -> Iterator[tuple[Labels, int]]:
    """The values of a counter by reason.

    Args:
        labels: The other labels.
        counts: By reason.
        expected: Reasons that are told as zero before they happen; else the first time would be no increase.
    """
    for reason, count in (dict.fromkeys(expected, 0) | dict(counts)).items():
        yield {**labels, "reason": reason}, count


class LogMetrics(Collector):
    """The log lines that a process could not write.

    Args:
        stage: Which process this is: a stage, or ``gateway``.
    """

    def __init__(self, stage: str) -> None:
        self._labels = {"stage": stage}

    def collect(self) -> Iterable[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        yield counter(
            "omnirelay_log_lines_dropped_total",
            "Log lines that could not be written: nobody reads them, or the disk is full.",
            [(self._labels, dropped_lines())],
        )


class EdgeMetrics(Collector):
    """What goes through the queues of a process.

    An edge is named by its receiving end: ``thinker``, ``talker`` and ``token2wav`` are the stages' inboxes,
    ``gateway`` is the gateway's events socket.

    Args:
        stage: Which process this is: a stage, or ``gateway``.
        sending: The queues it sends to, by edge.
        receiving: The queues it takes from, by edge.
        refused: Messages that other sockets refused, by edge and error code.
    """

    def __init__(
        self,
        stage: str,
        sending: Mapping[str, Outgoing],
        receiving: Mapping[str, PullQueue[Any]],
        refused: Mapping[str, Mapping[str, int]] | None = None,
    ) -> None:
        self._sending = [({"stage": stage, "edge": edge}, queue) for edge, queue in sending.items()]
        self._receiving = [({"stage": stage, "edge": edge}, queue) for edge, queue in receiving.items()]
        self._refused = [({"stage": stage, "edge": edge}, codes) for edge, codes in (refused or {}).items()]
        self._refused += [(labels, queue.refused) for labels, queue in self._receiving]

    def collect(self) -> Iterator[Metric]:
        """All metrics of the edges."""
        yield counter(
            "omnirelay_edge_sent_messages_total",
            "Messages handed to ZeroMQ.",
            ((labels, queue.sent.messages) for labels, queue in self._sending),
        )
        yield counter(
            "omnirelay_edge_sent_bytes_total",
            "Bytes of the messages handed to ZeroMQ, tensors included.",
            ((labels, queue.sent.bytes) for labels, queue in self._sending),
        )
        yield histogram(
            "omnirelay_edge_encode_seconds",
            "Time to encode a message.",
            ((labels, queue.sent.codec_seconds) for labels, queue in self._sending),
        )
        yield histogram(
            "omnirelay_edge_wait_seconds",
            "Time from when a message was encoded until ZeroMQ took it, on the sender's clock. What it then "
            "spends in ZeroMQ and on the wire is not in it: two processes have no clock in common.",
            ((labels, queue.waited) for labels, queue in self._sending),
        )
        yield gauge(
            "omnirelay_edge_backlog_bytes",
            "Bytes that wait in the sender because the receiver has not taken them.",
            ((labels, queue.backlog_bytes) for labels, queue in self._sending),
        )
        yield gauge(
            "omnirelay_edge_outstanding_bytes",
            "Bytes handed to ZeroMQ for which no credit has come back.",
            ((labels, queue.outstanding_bytes) for labels, queue in self._sending),
        )
        yield counter(
            "omnirelay_edge_stalled_seconds_total",
            "Time in which something waited in the sender because a receiver had not taken what came before.",
            ((labels, queue.stalled_s) for labels, queue in self._sending),
        )
        yield counter(
            "omnirelay_edge_received_messages_total",
            "Messages that arrived, refused ones included.",
            ((labels, queue.received.messages) for labels, queue in self._receiving),
        )
        yield counter(
            "omnirelay_edge_received_bytes_total",
            "Bytes of the messages that arrived.",
            ((labels, queue.received.bytes) for labels, queue in self._receiving),
        )
        yield histogram(
            "omnirelay_edge_decode_seconds",
            "Time to decode and check a message that was not refused.",
            ((labels, queue.received.codec_seconds) for labels, queue in self._receiving),
        )
        yield counter(
            "omnirelay_edge_refused_messages_total",
            "Messages that could not be believed, by error code.",
            (
                sample
                for labels, codes in self._refused
                for sample in by_reason(labels, codes, *(error.code for error in _REFUSALS))
            ),
        )

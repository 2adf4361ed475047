"""Metrics of a process's queues."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from omnirelay.errors import MessageError, PayloadError, RepeatedMessageError, SequenceError, VersionError
from shared.metrics import by_reason, counter, gauge, histogram
from shared.transport.queues import PullQueue
from shared.transport.routing import Outgoing

_REFUSALS: Final = (MessageError, VersionError, PayloadError, SequenceError, RepeatedMessageError)


class EdgeMetrics(Collector):
    """Metrics of a process's queues, by edge, and of messages that other sockets rejected.

    An edge is named after its receiver: ``thinker``, ``talker`` and ``token2wav`` are the stages' inboxes,
    ``gateway`` is the gateway's events socket.
    """

    def __init__(
        self,
        stage: str,
        sending: Mapping[str, Outgoing],
        inbox: PullQueue[Any],
        control_refused: Mapping[str, int],
    ) -> None:
        self._sending = [({"stage": stage, "edge": edge}, queue) for edge, queue in sending.items()]
        self._labels = {"stage": stage, "edge": stage}
        self._inbox = inbox
        self._refused = [
            ({"stage": stage, "edge": "control"}, control_refused),
            (self._labels, inbox.refused),
        ]

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
            "Time from the encoding of a message until ZeroMQ took it.",
            ((labels, queue.waited) for labels, queue in self._sending),
        )
        yield gauge(
            "omnirelay_edge_backlog_bytes",
            "Bytes that wait in the sender for a slow receiver.",
            ((labels, queue.backlog_bytes) for labels, queue in self._sending),
        )
        yield gauge(
            "omnirelay_edge_outstanding_bytes",
            "Bytes sent for which no credit has come back; a quarter of `window_bytes` is normal.",
            ((labels, queue.outstanding_bytes) for labels, queue in self._sending),
        )
        yield counter(
            "omnirelay_edge_stalled_seconds_total",
            "Time in which bytes waited in the sender, summed over receivers.",
            ((labels, queue.stalled_s) for labels, queue in self._sending),
        )
        yield counter(
            "omnirelay_edge_received_messages_total",
            "Messages that arrived, refused ones included.",
            [(self._labels, self._inbox.received.messages)],
        )
        yield counter(
            "omnirelay_edge_received_bytes_total",
            "Bytes of the messages that arrived.",
            [(self._labels, self._inbox.received.bytes)],
        )
        yield histogram(
            "omnirelay_edge_decode_seconds",
            "Time to decode and check an accepted message.",
            [(self._labels, self._inbox.received.codec_seconds)],
        )
        yield counter(
            "omnirelay_edge_refused_messages_total",
            "Messages that were invalid; `reason` is an error code.",
            (
                sample
                for labels, codes in self._refused
                for sample in by_reason(labels, codes, *(error.code for error in _REFUSALS))
            ),
        )

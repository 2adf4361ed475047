"""What the stages and the edges between them did during a load."""

from typing import Final

import msgspec

from benchmarks.adapters.transformers import STAGE_SECONDS
from benchmarks.measure.counters import Counters
from shared.messages import STAGES

ACTIVITIES: Final = ("wait", "take", "model", "engine", "send")


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's loop during a load.

    Attributes:
        name: Which stage.
        seconds: What its time went to, by activity, as ``omnirelay_stage_seconds_total`` tells it.
        steps: Steps of its engine.
        mean_batch: Requests in a step.
    """

    name: str
    seconds: dict[str, float]
    steps: int
    mean_batch: float


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """One edge during a load.

    Attributes:
        sender: The process that sends.
        receiver: The process that receives.
        messages: Their number.
        bytes: Of all messages.
        encode_us: To encode a message, on average, in microseconds.
        wait_us: Between that and ZeroMQ taking it.
        decode_us: To decode and check a message; of all senders to this receiver.
    """

    sender: str
    receiver: str
    messages: int
    bytes: int
    encode_us: float
    wait_us: float
    decode_us: float


def stages_of(counted: Counters) -> list[Stage]:
    """The stages that counted something."""
    named = counted.labels("omnirelay_stage_seconds_total", "stage")
    return [_stage(name, counted) for name in STAGES if name in named]


def edges_of(counted: Counters) -> list[Edge]:
    """The edges that carried something."""
    sent = "omnirelay_edge_sent_messages_total"
    return [
        _edge(sender, receiver, counted)
        for sender in ("gateway", *STAGES)
        for receiver in counted.labels(sent, "edge", stage=sender)
        if counted.get(sent, stage=sender, edge=receiver)
    ]


def parts_of(counted: Counters) -> dict[str, float]:
    """Seconds in each part of transformers' model; empty for other servers."""
    return {part: counted.get(STAGE_SECONDS, stage=part) for part in counted.labels(STAGE_SECONDS, "stage")}


def _stage(name: str, counted: Counters) -> Stage:
    steps = counted.get("omnirelay_stage_batch_requests_count", stage=name)
    return Stage(
        name=name,
        seconds={
            activity: counted.get("omnirelay_stage_seconds_total", stage=name, activity=activity)
            for activity in ACTIVITIES
        },
        steps=round(steps),
        mean_batch=_ratio(counted.get("omnirelay_stage_batch_requests_sum", stage=name), steps),
    )


def _edge(sender: str, receiver: str, counted: Counters) -> Edge:
    def mean_us(name: str, **labels: str) -> float:
        seconds = counted.get(f"{name}_sum", edge=receiver, **labels)
        return 1e6 * _ratio(seconds, counted.get(f"{name}_count", edge=receiver, **labels))

    return Edge(
        sender=sender,
        receiver=receiver,
        messages=round(counted.get("omnirelay_edge_sent_messages_total", stage=sender, edge=receiver)),
        bytes=round(counted.get("omnirelay_edge_sent_bytes_total", stage=sender, edge=receiver)),
        encode_us=mean_us("omnirelay_edge_encode_seconds", stage=sender),
        wait_us=mean_us("omnirelay_edge_wait_seconds", stage=sender),
        decode_us=mean_us("omnirelay_edge_decode_seconds", stage=receiver),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0

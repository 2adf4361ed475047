"""What is measured of a gateway."""

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import psutil

from benchmarks.gateway.clients import Interface, Received
from benchmarks.gateway.processes import Running, gateway_config, running
from benchmarks.gateway.stages import SPREAD_S, Sent
from benchmarks.measure.machine import Cpu, MachineFacts
from benchmarks.measure.results import percentile
from omnirelay.errors import OmniRelayError

STARTS_PER_S: Final = 150.0
"""New streams a second until all are there."""
SETTLE_S: Final = SPREAD_S + 4.0
"""From the last new stream until the measurement: all streams have sent their short first chunks."""
BEGIN_S: Final = 3.0
"""Time for the processes of clients to start."""
LATE_S: Final = 3.0
"""So long what was sent in the measurement may be under way."""
STREAMS_OF_A_REPLICA: Final = 64


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from before a stage sends an event until its client has read it.

    Attributes:
        p50: The median.
        p99: 99 of 100 take no longer.
        most: The longest.
    """

    p50: float
    p99: float
    most: float


class StreamLevel(msgspec.Struct, frozen=True, kw_only=True):
    """So many streams at once.

    Attributes:
        interface: ``tcp`` or ``http``.
        streams: How many; all were held to the end.
        seconds: For how long they were measured.
        events_per_s: Text, codec ids and audio that the stages sent.
        cpu: Of the gateway: seconds a second.
        cpu_us_per_event: Processor time of the gateway for each of those events.
        bytes_per_stream: Growth of the gateway's resident memory from no stream to all, for each.
        text: Of pieces of text.
        audio: Of chunks of audio.
        every: Of both.
        stages_cpu: Of the imitated stages: seconds a second.
        others_cpu: Share of the machine's cores that other processes had, the clients' among them.
    """

    interface: Interface
    streams: int
    seconds: float
    events_per_s: float
    cpu: float
    cpu_us_per_event: float
    bytes_per_stream: float
    text: Latency
    audio: Latency
    every: Latency
    stages_cpu: float
    others_cpu: float


class ReplicaLevel(msgspec.Struct, frozen=True, kw_only=True):
    """So many replicas of each stage, and no request.

    Attributes:
        replicas: Of each of the three stages.
        heartbeat_s: Interval of their heartbeats.
        seconds: For how long they were measured.
        cpu: Of the gateway, all threads: seconds a second.
        loop_cpu: Of the thread of its event loop.
        resident_bytes: Memory of the gateway.
    """

    replicas: int
    heartbeat_s: float
    seconds: float
    cpu: float
    loop_cpu: float
    resident_bytes: int


class GatewayResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        machine: Where.
        streams: What was measured with streams.
        replicas: What was measured with replicas.
        missed: What could not be measured, and why.
    """

    machine: MachineFacts
    streams: list[StreamLevel]
    replicas: list[ReplicaLevel]
    missed: list[str] = []


@contextmanager
def _stack(
    model: Path, streams: int, replicas: int, heartbeat_s: float = 0.5
) -> Iterator[tuple[Running, int]]:
    """A gateway with imitated stages, and its process id."""
    with tempfile.TemporaryDirectory() as folder:
        config = gateway_config(model, streams, heartbeat_s)
        with running(config, Path(folder), replicas) as stack:
            yield stack, stack.gateway.pid


def measure_streams(model: Path, interface: Interface, streams: int, seconds: float) -> StreamLevel:
    """Hold streams and measure their events.

    Raises:
        OmniRelayError: The gateway did not start, or a stream failed.
    """
    with _stack(model, streams, -(-streams // STREAMS_OF_A_REPLICA)) as (stack, pid):
        empty = psutil.Process(pid).memory_info().rss
        first = time.monotonic() + BEGIN_S
        starts = [first + number / STARTS_PER_S for number in range(streams)]
        begin = starts[-1] + SETTLE_S
        end = begin + seconds
        with stack.clients(interface, starts, end + LATE_S) as clients:
            time.sleep(max(0.0, begin - time.monotonic()))
            cpu, began = Cpu({"gateway": pid, "stages": stack.stages.pid}), time.monotonic()
            time.sleep(max(0.0, end - time.monotonic()))
            spent, measured, others = cpu.spent(), time.monotonic() - began, cpu.others()
            full = psutil.Process(pid).memory_info().rss
            received = stack.received(clients)
        sent = stack.stop_stages()
    texts, audio = (latencies(sent, received, kind, begin, end) for kind in ("text", "audio"))
    codecs = sum(begin <= at < end for times in sent.values() for at in times["codec"])
    events = len(texts) + len(audio) + codecs
    lasting = sum(bool(times["text"] and times["text"][-1] >= begin) for times in received.values())
    if lasting < streams:
        raise OmniRelayError(f"only {lasting} of {streams} streams lasted")
    return StreamLevel(
        interface=interface,
        streams=streams,
        seconds=measured,
        events_per_s=events / (end - begin),
        cpu=spent["gateway"] / measured,
        cpu_us_per_event=1e6 * spent["gateway"] / events,
        bytes_per_stream=(full - empty) / streams,
        text=_latency(texts),
        audio=_latency(audio),
        every=_latency(texts + audio),
        stages_cpu=spent["stages"] / measured,
        others_cpu=others,
    )


def measure_replicas(model: Path, replicas: int, heartbeat_s: float, seconds: float) -> ReplicaLevel:
    """Let so many replicas of each stage send heartbeats, at this interval.

    Raises:
        OmniRelayError: The gateway did not start.
    """
    with _stack(model, 1, replicas, heartbeat_s) as (_, pid):
        # Addresses that have become known are still sent to all.
        time.sleep(SETTLE_S + 2 * heartbeat_s)
        cpu, loop, began = Cpu({"gateway": pid}), thread_seconds(pid), time.monotonic()
        time.sleep(seconds)
        spent, loop, measured = cpu.spent(), thread_seconds(pid) - loop, time.monotonic() - began
        resident = psutil.Process(pid).memory_info().rss
    return ReplicaLevel(
        replicas=replicas,
        heartbeat_s=heartbeat_s,
        seconds=measured,
        cpu=spent["gateway"] / measured,
        loop_cpu=loop / measured,
        resident_bytes=resident,
    )


def latencies(sent: Sent, received: Received, kind: str, begin: float, end: float) -> list[float]:
    """Seconds from sending to receiving each event that was sent in an interval.

    Raises:
        OmniRelayError: One of them was not received.
    """
    found = []
    for request_id, times in received.items():
        if request_id not in sent:
            raise OmniRelayError(f"{request_id or 'a request'} was not answered")
        origin = sent[request_id][kind]
        within = [number for number, at in enumerate(origin) if begin <= at < end]
        if within and within[-1] >= len(times[kind]):
            raise OmniRelayError(f"{request_id}: {len(times[kind])} of {len(origin)} events of {kind} came")
        found += [times[kind][number] - origin[number] for number in within]
    return found


def _latency(seconds: list[float]) -> Latency:
    return Latency(
        p50=percentile(seconds, 0.5), p99=percentile(seconds, 0.99), most=max(seconds, default=math.nan)
    )


def thread_seconds(pid: int) -> float:
    """Processor time of a process's main thread, to the nanosecond."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9

"""What goes through a queue is counted, and what is counted can be scraped."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from omnirelay.errors import PayloadError, QueueFullError
from shared.exposition import expose
from shared.messages import AudioChunk, StageEvent, TextDelta
from shared.messages.payloads import Blob
from shared.metrics import Distribution, counter, gauge, histogram
from shared.transport.control import ControlClient
from shared.transport.metrics import EdgeMetrics
from shared.transport.queues import PullQueue, PushQueue
from shared.transport.wire import VERSION_BYTE
from tests.shared.support import ANY_PORT, Context, endpoint, free_address, sending, take, wait_until
from tests.support.http import PROMETHEUS, Readings, registry_of

EDGE = {"stage": "thinker", "edge": "gateway"}


def text(seq: int = 0) -> TextDelta:
    return TextDelta(request_id="a", seq=seq, token_ids=[1, 2, 3])


def audio(samples: int) -> AudioChunk:
    return AudioChunk(request_id="a", seq=0, samples=samples, data=Blob(bytes(4 * samples)))


@given(
    bounds=st.lists(st.integers(-50, 50), min_size=1, max_size=6, unique=True).map(sorted),
    values=st.lists(st.integers(-60, 60), max_size=50),
)
def test_a_distribution_counts_as_prometheus_wants_it(bounds: list[int], values: list[int]) -> None:
    distribution = Distribution(tuple(bounds))
    for value in values:
        distribution.observe(value)
    read = Readings([histogram("x_seconds", "x", [({"edge": "e"}, distribution)])])
    assert read("x_seconds_count", edge="e") == len(values)
    assert read("x_seconds_sum", edge="e") == sum(values)
    assert read("x_seconds_bucket", edge="e", le="+Inf") == len(values)
    for bound in bounds:
        expected = sum(value <= bound for value in values)
        assert read("x_seconds_bucket", edge="e", le=f"{bound:.1f}") == expected


def test_what_is_collected_is_valid_in_both_formats_of_prometheus(context: Context) -> None:
    inbox = PullQueue[StageEvent](context, ANY_PORT, StageEvent)
    sender = PushQueue[StageEvent](context, endpoint(inbox.socket), sending())
    sender.put(text())
    take(inbox, 1, meanwhile=sender.flush)
    inbox.refuse(PayloadError("rows", "are wrong"))
    registry = registry_of(EdgeMetrics("thinker", {"gateway": sender}, {"thinker": inbox}))
    plain = {each.name: each for each in text_string_to_metric_families(generate_latest(registry).decode())}
    open_text = openmetrics.generate_latest(registry).decode()
    strict = {each.name: each for each in parse_openmetrics(open_text)}
    assert plain.keys() == strict.keys()
    for name, metric in strict.items():
        assert name.startswith("omnirelay_")
        assert metric.type in ("counter", "gauge", "histogram")
        assert metric.documentation
        assert metric.samples
        assert name.endswith(("_bytes", "_messages", "_seconds"))


def test_a_family_needs_no_value() -> None:
    for make in (counter, gauge, histogram):
        assert make("x_total", "x", []).samples == []


def test_messages_and_bytes_of_an_edge_are_counted_at_both_ends(context: Context) -> None:
    inbox = PullQueue[StageEvent](context, ANY_PORT, StageEvent)
    sender = PushQueue[StageEvent](context, endpoint(inbox.socket), sending())
    metrics = EdgeMetrics("thinker", {"gateway": sender}, {"gateway": inbox})
    sizes = [sender.put(message) for message in (text(0), audio(100), audio(50_000), text(1))]
    take(inbox, 4, meanwhile=sender.flush)
    read = Readings(metrics.collect())
    for end in ("sent", "received"):
        assert read(f"omnirelay_edge_{end}_messages_total", **EDGE) == 4
        assert read(f"omnirelay_edge_{end}_bytes_total", **EDGE) == sum(sizes)
    for timed in ("encode", "decode", "wait"):
        assert read(f"omnirelay_edge_{timed}_seconds_count", **EDGE) == 4
    assert 0 < read("omnirelay_edge_encode_seconds_sum", **EDGE) < 1
    assert 0 < read("omnirelay_edge_decode_seconds_sum", **EDGE) < 1
    assert read("omnirelay_edge_backlog_bytes", **EDGE) == 0


def test_a_message_that_waits_for_its_receiver_is_seen_waiting(context: Context) -> None:
    address = free_address()
    sender = PushQueue[StageEvent](context, address, sending(max_backlog_bytes=1000))
    metrics = EdgeMetrics("thinker", {"gateway": sender}, {})
    size = sender.put(text())
    with pytest.raises(QueueFullError):
        sender.put(audio(1000))
    read = Readings(metrics.collect())
    assert read("omnirelay_edge_backlog_bytes", **EDGE) == size
    assert read("omnirelay_edge_sent_messages_total", **EDGE) == 0
    assert read("omnirelay_edge_wait_seconds_count", **EDGE) == 0
    late = PullQueue[StageEvent](context, address, StageEvent)
    assert take(late, 1, meanwhile=sender.flush) == [text()]
    read = Readings(metrics.collect())
    assert read("omnirelay_edge_backlog_bytes", **EDGE) == 0
    assert read("omnirelay_edge_sent_bytes_total", **EDGE) == size
    assert read("omnirelay_edge_wait_seconds_count", **EDGE) == 1
    waited = read("omnirelay_edge_wait_seconds_sum", **EDGE)
    assert 0 < waited < 20
    bounds = (0.001, 0.01, 0.1, 1.0, 10.0)
    counts = [read("omnirelay_edge_wait_seconds_bucket", **EDGE, le=str(bound)) for bound in bounds]
    expected = [0] * 6
    expected[bisect_left(bounds, waited)] = 1
    assert counts == list(accumulate(expected))[:5]


def test_refused_messages_are_counted_by_reason(context: Context) -> None:
    inbox = PullQueue[StageEvent](context, ANY_PORT, StageEvent)
    raw = context.socket(zmq.PUSH)
    raw.connect(endpoint(inbox.socket))
    for frames in ([VERSION_BYTE + b"spam"], [b"\x63xx"], [VERSION_BYTE + b"spam"]):
        raw.send_multipart(frames)
    wait_until(lambda: inbox.refused.total() == 3, meanwhile=lambda: list(inbox.drain()))
    inbox.refuse(PayloadError("rows", "do not fit"))
    control = ControlClient(context, free_address(), "thinker")
    control.refused["message_invalid"] += 1
    metrics = EdgeMetrics("gateway", {}, {"gateway": inbox}, {"control": [control.refused]})
    read = Readings(metrics.collect())

    def refused(edge: str, reason: str) -> float:
        return read("omnirelay_edge_refused_messages_total", stage="gateway", edge=edge, reason=reason)

    assert refused("gateway", "message_invalid") == 2
    assert refused("gateway", "version_unsupported") == 1
    assert refused("gateway", "payload_invalid") == 1
    assert refused("control", "message_invalid") == 1
    assert read("omnirelay_edge_received_messages_total", stage="gateway", edge="gateway") == 3
    assert read("omnirelay_edge_decode_seconds_count", stage="gateway", edge="gateway") == 0


def test_openmetrics_keeps_the_names_of_a_gauge_and_of_a_counter_beside_it() -> None:
    class Both(Collector):
        def collect(self) -> Iterator[Metric]:
            yield gauge("x_requests", "Living.", [({}, 2)])
            yield counter("x_requests_total", "Ended.", [({}, 5)])
            yield counter("vllm:things_total", "Things.", [({}, 1)])

    body, _ = expose(registry_of(Both()), "application/openmetrics-text")
    families = {each.name: (each.type, each.samples[0].name) for each in parse_openmetrics(body.decode())}
    assert families == {
        "x_requests": ("gauge", "x_requests"),
        "x_requests_total": ("unknown", "x_requests_total"),
        "vllm:things": ("counter", "vllm:things_total"),
    }
    plain = {
        each.name: each.type
        for each in text_string_to_metric_families(expose(registry_of(Both()))[0].decode())
    }
    assert plain["vllm:things"] == "counter"


@pytest.mark.parametrize(
    ("accept", "openmetrics_wanted"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=0.0.1, text/plain", False),
        ("application/openmetrics-text;version=new", False),
        ("application/openmetrics-text;q=nan,;;,=;q", True),
        ("text/html,*/*;q=0.8", False),
        ("", False),
    ],
)
def test_who_gets_openmetrics(accept: str, openmetrics_wanted: bool) -> None:
    body, kind = expose(registry_of(), accept)
    assert kind.startswith(
        "application/openmetrics-text; version=1.0.0;" if openmetrics_wanted else "text/plain;"
    )
    assert body == (b"# EOF\n" if openmetrics_wanted else b"")

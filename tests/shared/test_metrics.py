"""What is counted can be scraped: metrics, and the HTTP endpoint that tells them, to all kinds of clients."""

import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from omnirelay.errors import AddressInUseError, ConfigError, PayloadError, QueueFullError
from shared.exposition import expose
from shared.http import protocol
from shared.http.server import MAX_WATCHERS
from shared.messages import StageEvent
from shared.metrics import Distribution, counter, gauge, histogram
from shared.stage.endpoint import HttpEndpoint
from shared.transport.control import ControlClient
from shared.transport.metrics import EdgeMetrics
from shared.transport.queues import PullQueue, PushQueue
from shared.transport.wire import VERSION_BYTE
from tests.shared.support import (
    ANY_PORT,
    DEADLINE_S,
    Context,
    endpoint,
    free_address,
    port_of,
    read_all,
    sending,
    take,
    wait_until,
)
from tests.shared.test_queues import audio, text
from tests.support.children import Patch
from tests.support.http import PROMETHEUS, Readings, get, registry_of
from tests.support.ports import has_ipv6

EDGE = {"stage": "thinker", "edge": "gateway"}


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
    registry = registry_of(EdgeMetrics("thinker", {"gateway": sender}, inbox, {}))
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
    metrics = EdgeMetrics("thinker", {"gateway": sender}, inbox, {})
    sizes = [sender.put(message) for message in (text(0), audio(100), audio(50_000), text(1))]
    take(inbox, 4, meanwhile=sender.flush)
    read = Readings(metrics.collect())
    own = {"stage": "thinker", "edge": "thinker"}
    for end, edge in (("sent", EDGE), ("received", own)):
        assert read(f"omnirelay_edge_{end}_messages_total", **edge) == 4
        assert read(f"omnirelay_edge_{end}_bytes_total", **edge) == sum(sizes)
    for timed, edge in (("encode", EDGE), ("wait", EDGE), ("decode", own)):
        assert read(f"omnirelay_edge_{timed}_seconds_count", **edge) == 4
    assert 0 < read("omnirelay_edge_encode_seconds_sum", **EDGE) < 1
    assert 0 < read("omnirelay_edge_decode_seconds_sum", **own) < 1
    assert read("omnirelay_edge_backlog_bytes", **EDGE) == 0


def test_a_message_that_waits_for_its_receiver_is_seen_waiting(context: Context) -> None:
    address = free_address()
    sender = PushQueue[StageEvent](context, address, sending(max_backlog_bytes=1000))
    idle = PullQueue[StageEvent](context, ANY_PORT, StageEvent)
    metrics = EdgeMetrics("thinker", {"gateway": sender}, idle, {})
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
    metrics = EdgeMetrics("gateway", {}, inbox, control.refused)
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


Reason = str | None
LARGE = 32 * 2**20
"""Bytes of an answer that the buffers of two sockets do not hold."""
ANSWERED = b"GET /livez HTTP/1.1\r\nHost: here\r\n\r\n"


class Large(Collector):
    def collect(self) -> Iterator[Metric]:
        yield counter("large_total", "x" * LARGE, [])


class Served:
    """An endpoint, and what it is to say."""

    def __init__(self) -> None:
        self.address = free_address()
        self.live: Reason = None
        self.ready: Reason = "the model is being loaded"
        self.registry = CollectorRegistry()
        self.counter = Counter("vllm:things", "Things.", registry=self.registry)
        self.endpoint = HttpEndpoint(self.address, lambda: self.live, lambda: self.ready, self.registry)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port_of(self.address)), timeout=DEADLINE_S)
        connection.settimeout(DEADLINE_S)
        return connection


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    with served.endpoint:
        yield served


def test_health_is_told_as_json_with_the_reason(served: Served) -> None:
    live, ready = get(served.address, "/livez"), get(served.address, "/readyz")
    assert (live.status, live.json) == (200, {"status": "ok"})
    assert ready.status == 503
    assert ready.json == {"status": "unavailable", "reason": "the model is being loaded"}
    assert ready.headers["Content-Type"] == "application/json"
    served.live, served.ready = "it hangs", None
    assert get(served.address, "/livez").json["reason"] == "it hangs"
    assert get(served.address, "/readyz?verbose").status == 200


def test_openmetrics_for_who_prefers_them_and_prometheus_own_format_for_all_others(served: Served) -> None:
    served.counter.inc(3)
    preferred = get(served.address, "/metrics", headers={"accept": PROMETHEUS})
    other = get(served.address, "/metrics?why", headers={"Accept": "*/*"})
    assert other.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    # One sample a counter: no time stamp beside it.
    for family in (preferred.openmetrics["vllm:things"], other.metrics["vllm:things_total"]):
        (sample,) = family.samples
        assert (sample.name, sample.value) == ("vllm:things_total", 3)


@pytest.mark.parametrize("method", ["POST", "PUT", "OPTIONS"])
def test_nothing_but_get_and_head_is_taken(served: Served, method: str) -> None:
    answer = get(served.address, "/metrics", method)
    assert (answer.status, {*answer.headers["Allow"].split(", ")}) == (405, {"GET", "HEAD"})


@pytest.mark.parametrize("path", ["/", "/metrics/", "/livez2", "/favicon.ico", "//metrics"])
def test_another_path_is_not_found(served: Served, path: str) -> None:
    assert get(served.address, path).status == 404


def test_a_request_that_cannot_be_read_is_refused_and_one_that_breaks_off_harms_nobody(
    served: Served,
) -> None:
    with served.connect() as connection:
        connection.sendall(b"GET /met\xffrics HTTP/2.0\r\n\r\n")
        assert connection.recv(24) == b"HTTP/1.1 400 Bad Request"
    with served.connect() as connection:
        connection.sendall(b"GET /li")
    assert get(served.address, "/livez").status == 200


def test_silent_clients_keep_nobody_out(served: Served) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(served.connect()) for _ in range(MAX_WATCHERS + 1)]
        assert get(served.address, "/livez").status == 200
        assert read_all(silent[0]) == b""


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (b"", b""),
        (b"", b"GET /metrics HTTP/1.1\r\n"),
        (ANSWERED, b"GET /livez HT"),
        (ANSWERED + b"GET /livez HT", b""),
    ],
    ids=["nothing", "head", "second head", "second head at once"],
)
def test_a_silent_client_is_dropped_after_a_while(monkeypatch: Patch, before: bytes, words: bytes) -> None:
    # Where a first head is to be answered, long enough for a busy machine to read it.
    monkeypatch.setattr(protocol, "HEAD_S", 2.0 if before else 0.05)
    served = Served()
    with served.endpoint, served.connect() as connection:
        connection.sendall(before)
        told = b""
        while before and not told.endswith(b"}"):
            told += connection.recv(65536)
        connection.sendall(words)
        # Before the limit of the time between two requests.
        connection.settimeout(30)
        assert read_all(connection) == b""


def test_a_client_that_does_not_read_keeps_nobody_waiting_and_is_dropped(monkeypatch: Patch) -> None:
    monkeypatch.setattr(protocol, "STALL_S", 0.5)
    served = Served()
    served.registry.register(Large())
    with served.endpoint, served.connect() as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 200"
        assert get(served.address, "/livez").status == 200
        wait_until(lambda: not served.endpoint.places.taken)
        assert len(read_all(connection)) < LARGE


def test_a_client_that_reads_a_large_answer_slowly_gets_all_of_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr(protocol, "STALL_S", 0.5)
    served = Served()
    served.registry.register(Large())
    with served.endpoint, served.connect() as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        received = 0
        while part := connection.recv(2**20):
            received += len(part)
            time.sleep(len(part) / 2**20 * 0.1)
        assert received > LARGE


def test_a_metric_that_cannot_be_read_is_told_and_health_is_still_answered(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    broken = threading.Event()

    class Broken(Collector):
        def collect(self) -> Iterator[Metric]:
            if broken.is_set():
                raise ZeroDivisionError("no such number")
            return iter(())

    served.registry.register(Broken())
    broken.set()
    assert get(served.address, "/metrics").status == 500
    wait_until(lambda: "no such number" in caplog.text)
    assert get(served.address, "/livez").status == 200


def test_an_address_in_use_is_named(served: Served) -> None:
    with pytest.raises(AddressInUseError, match=f"{served.address} is in use: is another OmniRelay"):
        HttpEndpoint(served.address, lambda: None, lambda: None)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_cannot_be_used_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on tcp://{host}:5572"):
        HttpEndpoint(f"tcp://{host}:5572", lambda: None, lambda: None)


@pytest.mark.parametrize("host", ["*", "127.0.0.1", "localhost", "[::1]"])
def test_every_way_to_write_a_host_is_understood(host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    port = port_of(free_address())
    with HttpEndpoint(f"tcp://{host}:{port}", lambda: None, lambda: None):
        asked = host if "::" in host else "127.0.0.1"
        assert get(f"tcp://{asked}:{port}", "/livez").status == 200


def test_closing_frees_the_address_and_drops_who_is_there(served: Served) -> None:
    with served.connect() as connection:
        get(served.address, "/livez")
        served.endpoint.close()
        assert read_all(connection) == b""
        with HttpEndpoint(served.address, lambda: None, lambda: None):
            assert get(served.address, "/livez").status == 200

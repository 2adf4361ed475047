"""Where traces go, what clients' spans are believed, what stages tell; a collector's troubles are its own."""

import logging
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import ConfigError, InvalidRequestError, UnknownSpeakerError
from shared.config import Config, TracingConfig
from shared.messages import CodecTokens, SynthesisStart
from shared.tracing import otel, timeline
from shared.tracing.otel import Tracer
from shared.tracing.setup import open_tracer, traces_url
from shared.tracing.timeline import Timeline
from shared.transport.queues import PushQueue
from tests.shared.stages import STAGE, Harness, running
from tests.shared.support import Context, free_address, sending, wait_until
from tests.shared.test_process import start_echo
from tests.support.children import ROOT, Patch
from tests.support.http import get
from tests.support.otlp import Collector, Span, wait_for_senders
from tests.support.thinking import speech_of

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PARENT = f"00-{'ab' * 16}-{'cd' * 8}-01"


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_for_senders()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def tracer(collector: Collector) -> Iterator[Tracer]:
    tracer = Tracer("gateway", f"{collector.url}/v1/traces", 1.0)
    yield tracer
    tracer.close()


def tell(tracer: Tracer, count: int = 1) -> None:
    for _ in range(count):
        span = tracer.begin("request", None, time.time_ns())
        assert span is not None
        tracer.end(span, time.time_ns(), [], {})


@pytest.mark.parametrize(
    ("endpoint", "environment", "url"),
    [
        (None, {}, None),
        (None, {BASE: "", TRACES: " "}, None),
        ("http://a:4318", {}, "http://a:4318/v1/traces"),
        ("http://a:4318/", {}, "http://a:4318/v1/traces"),
        ("https://a/otlp", {}, "https://a/otlp/v1/traces"),
        ("https://a/otlp/v1/traces", {}, "https://a/otlp/v1/traces"),
        ("https://a/otlp/v1/traces/", {}, "https://a/otlp/v1/traces"),
        ("http://[::1]:4318", {}, "http://[::1]:4318/v1/traces"),
        ("http://a:4318", {BASE: "http://b:1", TRACES: "http://c:1/x"}, "http://a:4318/v1/traces"),
        (None, {BASE: "http://b:1"}, "http://b:1/v1/traces"),
        (None, {BASE: "http://b:1", TRACES: "http://c:1/x"}, "http://c:1/x"),
        ("http://a:4318", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_where_traces_go(endpoint: str | None, environment: dict[str, str], url: str | None) -> None:
    assert traces_url(TracingConfig(endpoint=endpoint), environment) == url


def test_an_empty_endpoint_is_none() -> None:
    assert Config.model_validate({"tracing": {"endpoint": ""}}).tracing.endpoint is None


@pytest.mark.parametrize(
    "address",
    [
        "collector:4318",
        "grpc://collector:4317",
        "http://",
        "http://:4318",
        "http://a:0",
        "http://a:65536",
        "http://a:port",
        "http://[::1",
        "http://user:secret@a:4318",
        "http://a:4318?key=secret",
        "http://a:4318#x",
        "http://a b:4318",
        "http://a:4318\n",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="is not http://HOST:PORT"):
        TracingConfig(endpoint=address)
    if address == address.strip():
        with pytest.raises(ConfigError, match=f"{TRACES}: .* is not http://HOST:PORT"):
            traces_url(TracingConfig(), {TRACES: address})


def test_a_variable_that_the_sdk_cannot_use_is_told(monkeypatch: Patch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(ConfigError, match="max_queue_size must be a positive integer"):
        open_tracer(TracingConfig(endpoint="http://127.0.0.1:9"), "gateway")


def test_without_an_endpoint_nothing_of_opentelemetry_is_loaded() -> None:
    program = (
        "import sys, gateway.process, gateway.http.server\n"
        "from shared.config import Config\n"
        "from shared.tracing.setup import open_tracer\n"
        "assert open_tracer(Config().tracing, 'gateway') is None\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'requests', 'google'))])"
    )
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


NAMES = f"{'ab' * 16}-{'cd' * 8}"
BELIEVED = {
    True: [f"00-{NAMES}-01", f"00-{NAMES}-03", f" 00-{NAMES}-01 ", f"cc-{NAMES}-01", f"cc-{NAMES}-01-more"],
    False: [
        *("", "00", f"ff-{NAMES}-01", f"0A-{NAMES}-01", f"0-{NAMES}-01", f"00_{NAMES}-01", f"00-{NAMES}-1"),
        *(f"00-{NAMES}-0G", f"00-{NAMES}-01-", f"00-{NAMES}-01-more", f"00-{NAMES}-01more"),
        *(f"cc-{NAMES}-01more", f"cc-{NAMES}-01-{'x' * 600}", f"00-{NAMES}-01\n", f"cc-{NAMES}-01-a\nb"),
        *(f"00-{NAMES.upper()}-01", f"00-{NAMES[1:]}-01", f"00-{NAMES[:-1]}-01", f"00-a{NAMES}-01"),
        *(f"00-{'0' * 32}-{'cd' * 8}-01", f"00-{'ab' * 16}-{'0' * 16}-01"),
    ],
}
"""As W3C's Trace Context reads them (level 2, section 3.2); any text: ``tests/fuzz/targets/media.py``."""


@pytest.mark.parametrize(
    ("header", "is_believed"), [(header, is_so) for is_so, headers in BELIEVED.items() for header in headers]
)
def test_a_clients_span_is_believed_if_it_has_the_form(
    tracer: Tracer, header: str, is_believed: bool
) -> None:
    span = tracer.begin("request", header, 1)
    assert span is not None
    _, trace, own, _ = tracer.traceparent(span).split("-")
    assert (trace == "ab" * 16) == is_believed
    assert own != "cd" * 8
    # A client may say that its trace is not recorded.
    assert tracer.begin("request", f"00-{NAMES}-00", 1) is None


def test_processes_whose_libraries_seed_pythons_generator_alike_do_not_draw_the_same_names(
    tracer: Tracer,
) -> None:
    names = set()
    for _ in range(2):
        random.seed(0)
        for parent in (PARENT, None):
            span = tracer.begin("request", parent, 1)
            assert span is not None
            names.add(tracer.traceparent(span))
    assert len(names) == 4


def test_a_ratio_of_the_requests_is_traced_and_whom_the_client_wants(collector: Collector) -> None:
    tracer = Tracer("gateway", collector.url, 0.25)
    kept = [tracer.begin("request", None, 1) for _ in range(400)]
    assert 40 < sum(span is not None for span in kept) < 200
    assert tracer.begin("request", PARENT, 1) is not None
    assert tracer.begin("request", PARENT[:-1] + "0", 1) is None
    tracer.close()


def test_spans_are_told_as_they_were(tracer: Tracer, collector: Collector) -> None:
    span = tracer.begin("thinker", PARENT, 1_000, server=True)
    assert span is not None
    phases = [timeline.Phase("queue", 1_000, 2_000), timeline.Phase("decode", 2_000, 9_000)]
    tracer.end(span, 9_000, phases, {"a": 1, "b": ["x", "y"]}, "stage_failed")
    name = tracer.traceparent(span)
    tracer.close()
    trace = collector.trace("ab" * 16, "thinker")
    top = trace["thinker"]
    assert top.is_named(name)
    assert (top.service, top.parent_id, top.server) == ("omnirelay-gateway", "cd" * 8, True)
    assert (top.begin, top.end, top.error) == (1_000, 9_000, "stage_failed")
    assert top.attributes == {"a": 1, "b": ["x", "y"], "error.type": "stage_failed"}
    assert [(each.name, each.begin, each.end) for each in trace.below(top)] == phases
    assert collector.paths == {"/v1/traces"}


def test_what_the_environment_says_to_the_collector_is_sent(collector: Collector, monkeypatch: Patch) -> None:
    monkeypatch.setenv(BASE, collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20secret")
    tracer = open_tracer(TracingConfig(), "talker")
    assert tracer is not None
    tell(tracer)
    tracer.close()
    (span,) = collector.spans()
    assert span.service == "omnirelay-talker"
    assert {name.lower(): value for name, value in collector.headers.items()}[
        "authorization"
    ] == "Bearer secret"


@given(st.lists(st.none() | st.floats(-10, 10), max_size=2 * timeline.MAX_PHASES))
@settings(deadline=None, max_examples=30)
def test_phases_follow_one_another_without_gap(offsets: list[float | None]) -> None:
    before = time.time_ns()
    line, now = Timeline("0"), time.monotonic()
    for number, offset in enumerate(offsets):
        line.enter(str(number + 1), None if offset is None else now + offset)
    phases = line.end()
    assert [phase.name for phase in phases] == [
        str(n) for n in range(min(len(offsets) + 1, timeline.MAX_PHASES))
    ]
    assert phases[0].began_ns >= before
    assert all(one.ended_ns == other.began_ns for one, other in pairwise(phases))
    assert all(phase.began_ns <= phase.ended_ns for phase in phases)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own warnings; pytest hears OpenTelemetry's too, which no handler of the process does."""
    ours = [record for record in caplog.records if record.name == otel.__name__]
    return [record.getMessage() for record in ours if record.levelno >= logging.WARNING]


def test_a_collector_that_is_not_there_is_named_once_and_keeps_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    tracer = Tracer("gateway", url, 1.0)
    tell(tracer, 20)
    wait_until(lambda: bool(said(caplog)))
    began = time.monotonic()
    tell(tracer, 2000)
    # An attempt to deliver them takes up to 10 s.
    assert time.monotonic() - began < 5
    wait_until(lambda: len(tracer._processor._batch_processor._queue) <= 100)
    monkeypatch.setattr(otel, "FLUSH_S", 60.0)
    began = time.monotonic()
    tracer.close()
    assert time.monotonic() - began < otel.FLUSH_S / 2
    (line,) = said(caplog)
    assert line.startswith(f"traces cannot be sent to {url} (not repeated for 300 s): ")
    assert "Connection refused" in line


@pytest.mark.parametrize("status", [404, 503])
def test_a_collector_that_refuses_is_told_once_and_believed_when_it_is_well_again(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: Patch, status: int
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    # Shorter than the pause before another attempt, so that none is made.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.7")
    tracer = Tracer("gateway", collector.url, 1.0)
    collector.status = status
    wait_until(lambda: collector.posts >= 3, meanwhile=lambda: tell(tracer))
    assert tracer._complaints.failing.is_set()
    collector.status = 200
    wait_until(lambda: not tracer._complaints.failing.is_set(), meanwhile=lambda: tell(tracer))
    tracer.close()
    assert collector.spans()
    assert len(said(caplog)) == 1


def test_a_collector_that_never_answers_delays_the_end_by_a_bound(monkeypatch: Patch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = Tracer("gateway", f"http://127.0.0.1:{silent.getsockname()[1]}", 1.0)
        tell(tracer)
        began = time.monotonic()
        tracer.close()
        assert time.monotonic() - began < otel.FLUSH_S + 20


TRACE = "ab" * 16
GATEWAY = "cd" * 8
TRACEPARENT = f"00-{TRACE}-{GATEWAY}-01"


@pytest.fixture
def harness(context: Context, collector: Collector, monkeypatch: Patch) -> Iterator[Harness]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with running(context) as harness:
        harness.service.traces.tracer = Tracer(STAGE, collector.url, 1.0)
        yield harness
        harness.service.traces.tracer.close()


def start(harness: Harness, request_id: str, traceparent: str | None = TRACEPARENT) -> None:
    harness.sender.put(start_of(request_id, traceparent))
    harness.send(request_id)


def start_of(request_id: str, traceparent: str | None) -> SynthesisStart:
    return SynthesisStart(request_id=request_id, priority=0, speech=speech_of(), traceparent=traceparent)


def told(collector: Collector, request_id: str) -> Span:
    """The stage's span of a request, which must be below the gateway's."""

    def found(spans: list[Span]) -> list[Span]:
        return [span for span in spans if span.attributes.get("omnirelay.request.id") == request_id]

    (span,) = found(collector.spans(lambda spans: bool(found(spans))))
    assert (span.service, span.name, span.server) == (f"omnirelay-{STAGE}", STAGE, False)
    assert (span.trace_id, span.parent_id) == (TRACE, GATEWAY)
    return span


def test_a_request_that_is_done(harness: Harness, collector: Collector) -> None:
    before = time.time_ns()
    start(harness, "a")
    harness.send("a", 1, last=True)
    harness.take(2)
    span = told(collector, "a")
    assert (span.error, span.attributes["omnirelay.outcome"]) == (None, "completed")
    assert before <= span.begin <= span.end <= time.time_ns()
    (phase,) = (each for each in collector.spans() if each.parent_id == span.span_id)
    assert (phase.name, phase.begin, phase.end) == ("wait_codes", span.begin, span.end)


def test_requests_that_fail_wherever_they_do(harness: Harness, collector: Collector) -> None:
    harness.service.accept_errors = {"a": UnknownSpeakerError("no voice 'a secret'")}
    harness.service.step_failures = {"b": InvalidRequestError("'a secret' is wrong")}
    for request_id in "ab":
        start(harness, request_id)
    harness.take(2)
    for request_id, code in (("a", "unknown_speaker"), ("b", "invalid_request")):
        span = told(collector, request_id)
        assert (span.error, span.attributes["omnirelay.outcome"]) == (code, "failed")
        assert span.attributes["error.type"] == code
    assert "secret" not in repr(collector.spans())


def test_a_request_that_is_aborted_is_no_error(harness: Harness, collector: Collector) -> None:
    start(harness, "a")
    harness.take(1)
    harness.abort("a")
    span = told(collector, "a")
    assert (span.error, span.attributes["omnirelay.outcome"]) == (None, "aborted")


def test_nothing_is_kept_of_requests_that_are_not_traced(harness: Harness, collector: Collector) -> None:
    start(harness, "a", None)
    start(harness, "b", f"00-{TRACE}-{GATEWAY}-00")
    harness.send("a", 1, last=True)
    harness.send("b", 1, last=True)
    harness.take(4)
    tracer, harness.service.traces.tracer = harness.service.traces.tracer, None
    start(harness, "c")
    harness.take(1)
    assert harness.service.traces._open == {}
    harness.service.traces.tracer = tracer
    start(harness, "d")
    harness.take(1)
    harness.abort("d")
    told(collector, "d")
    assert {span.name for span in collector.spans()} == {STAGE, "wait_codes"}
    assert len(collector.spans()) == 2


def test_a_stage_that_ends_sends_its_last_spans(tiny_checkpoint: Path, collector: Collector) -> None:
    inbox, http = free_address(), free_address()
    process = start_echo(
        tiny_checkpoint,
        http=http,
        OMNIRELAY_STAGES__TOKEN2WAV__INBOX=inbox,
        OMNIRELAY_TRACING__ENDPOINT=collector.url,
        OTEL_BSP_SCHEDULE_DELAY="600000",
    )
    received = "omnirelay_edge_received_messages_total"
    with process, zmq.Context() as context:
        process.stdin.close()
        wait_until(lambda: listens(http))
        push: PushQueue[SynthesisStart | CodecTokens] = PushQueue(context, inbox, sending())
        push.put(start_of("a", TRACEPARENT))
        push.put(CodecTokens(request_id="a", seq=0, token_ids=[1], last=True))
        wait_until(lambda: get(http, "/metrics").metrics[received].samples[0].value == 2, push.flush)
        push.close()
        process.send_signal(signal.SIGTERM)
        lines = process.stderr.readlines()
        assert process.wait(timeout=60) == 0, lines
    texts = [line.split(": ", 1)[1].strip() for line in lines]
    assert texts.count("stopped") == 1
    assert [text for text in texts if text.startswith("traces go to")]
    told(collector, "a")


def listens(address: str) -> bool:
    try:
        return get(address, "/readyz").status == 200
    except OSError:
        return False

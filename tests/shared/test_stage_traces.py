"""What a stage tells of its requests: how each ended, below the gateway's span, and only of those traced."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from omnirelay.errors import InvalidRequestError, UnknownSpeakerError
from shared.messages import CodecTokens, SynthesisStart
from shared.tracing.otel import Tracer
from shared.transport.queues import PushQueue
from tests.shared.stages import STAGE, Harness, running
from tests.shared.support import Context, free_address, sending, wait_until
from tests.shared.test_process import start_echo
from tests.support.http import get
from tests.support.otlp import Collector, Span, wait_for_senders
from tests.support.thinking import speech_of

TRACE = "ab" * 16
GATEWAY = "cd" * 8
TRACEPARENT = f"00-{TRACE}-{GATEWAY}-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def harness(context: Context, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with running(context) as harness:
        harness.service.traces.tracer = Tracer(STAGE, collector.url, 1.0)
        yield harness
        harness.service.traces.tracer.close()
    wait_for_senders()


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


def test_an_engine_that_breaks_fails_every_request(harness: Harness, collector: Collector) -> None:
    start(harness, "a")
    harness.take(1)
    harness.service.step_error = RuntimeError("out of memory")
    harness.send("a", 1)
    assert harness.take_failure().code == "engine_failed"
    assert told(collector, "a").error == "engine_failed"


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


@pytest.mark.parametrize("there", [True, False])
def test_a_stage_that_ends_sends_its_last_spans_and_waits_for_no_dead_collector(
    tiny_checkpoint: Path, collector: Collector, there: bool
) -> None:
    inbox, http, nobody = free_address(), free_address(), free_address().replace("tcp", "http")
    process = start_echo(
        tiny_checkpoint,
        http=http,
        OMNIRELAY_STAGES__TOKEN2WAV__INBOX=inbox,
        OMNIRELAY_TRACING__ENDPOINT=collector.url if there else nobody,
        OTEL_BSP_SCHEDULE_DELAY="600000",
    )
    received = "omnirelay_edge_received_messages_total"
    with process, zmq.Context() as context:
        assert process.stdin is not None
        process.stdin.close()
        wait_until(lambda: listens(http))
        push: PushQueue[SynthesisStart | CodecTokens] = PushQueue(context, inbox, sending())
        push.put(start_of("a", TRACEPARENT))
        push.put(CodecTokens(request_id="a", seq=0, token_ids=[1], last=True))
        wait_until(lambda: get(http, "/metrics").metrics[received].samples[0].value == 2, push.flush)
        push.close()
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        lines = process.stderr.readlines()
        assert process.wait(timeout=60) == 0, lines
    texts = [line.split(": ", 1)[1].strip() for line in lines]
    assert texts.count("stopped") == 1
    assert [text for text in texts if text.startswith("traces go to")]
    if there:
        told(collector, "a")
    else:
        assert any(text.startswith(f"traces cannot be sent to {nobody}") for text in texts)


def listens(address: str) -> bool:
    try:
        return get(address, "/readyz").status == 200
    except OSError:
        return False

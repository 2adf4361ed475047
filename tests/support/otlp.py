"""A collector of traces: takes what OTLP over HTTP brings, and keeps the spans."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as EncodedSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from shared.tracing.otel import LAST_SPANS
from tests.support.processes import wait_until

DEADLINE_S = 60.0


@dataclass(frozen=True)
class Span:
    """A span that came; ids are in hexadecimal, times in nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    server: bool
    begin: int
    end: int
    attributes: Mapping[str, Any]
    events: Mapping[str, int]
    error: str | None

    def is_named(self, traceparent: str | None) -> bool:
        """Whether a header names this span, and that it is sampled."""
        version, trace_id, span_id, flags = (traceparent or "---").split("-")
        named = (version, trace_id, span_id) == ("00", self.trace_id, self.span_id)
        return named and bool(int(flags, 16) & 1)


class Collector:
    """Listens on the loopback.

    Attributes:
        status: What it answers.
        posts: How often something came.
        paths: Where to.
        headers: What came with it last.
    """

    def __init__(self) -> None:
        self.status = 200
        self.posts = 0
        self.paths: set[str] = set()
        self.headers: Mapping[str, str] = {}
        self._spans: list[Span] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector._take(self.path, dict(self.headers), body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="collector")

    @property
    def url(self) -> str:
        """Where to send spans."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def spans(self, condition: Callable[[list[Span]], bool] = bool) -> list[Span]:
        """Wait until the spans that came fulfil a condition, and give them.

        Raises:
            TimeoutError: They did not within :data:`DEADLINE_S`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self._spans), DEADLINE_S):
                raise TimeoutError(f"spans are missing after {DEADLINE_S:g} s; there are {self._spans}")
            return list(self._spans)

    def trace(self, trace_id: str, *names: str) -> "Trace":
        """Wait until a trace has spans of these names, and give it."""
        spans = self.spans(
            lambda spans: set(names) <= {span.name for span in spans if span.trace_id == trace_id}
        )
        return Trace([span for span in spans if span.trace_id == trace_id])

    def request(self, request_id: str, *names: str) -> "Trace":
        """Wait for the trace of a request, and until it has spans of these names too."""

        def found(spans: list[Span]) -> list[str]:
            asked = ("omnirelay.request.id", request_id)
            return [
                span.trace_id for span in spans if span.name == "request" and asked in span.attributes.items()
            ]

        (trace_id,) = found(self.spans(lambda spans: bool(found(spans))))
        return self.trace(trace_id, *names)

    def _take(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        with self._changed:
            self.posts += 1
            self.paths.add(path)
            self.headers = headers
            if self.status == 200:
                self._spans += decode(body)
            self._changed.notify_all()


class Trace:
    """The spans of one trace.

    Args:
        spans: All that came.
    """

    def __init__(self, spans: list[Span]) -> None:
        self.spans = spans

    @property
    def root(self) -> Span:
        """The gateway's span of the request."""
        return self["request"]

    def __getitem__(self, name: str) -> Span:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def below(self, parent: Span) -> list[Span]:
        """The spans directly below one, in the order of their begin."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: (span.begin, span.end))


def decode(body: bytes) -> list[Span]:
    """The spans of an ExportTraceServiceRequest."""
    request = ExportTraceServiceRequest()
    request.ParseFromString(body)
    return [
        _span(str(_plain(resource.resource.attributes)["service.name"]), span)
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _span(service: str, span: Any) -> Span:
    failed = span.status.code == Status.STATUS_CODE_ERROR
    return Span(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        server=span.kind == EncodedSpan.SPAN_KIND_SERVER,
        begin=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_plain(span.attributes),
        events={event.name: event.time_unix_nano for event in span.events},
        error=span.status.message if failed else None,
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    inner = getattr(value, kind)
    return [_value(each) for each in inner.values] if kind == "array_value" else inner


def wait_for_senders() -> None:
    """Wait until no thread of an ended tracer is left: other tests would feel it."""
    wait_until(lambda: LAST_SPANS not in {each.name for each in threading.enumerate()}, "the end", DEADLINE_S)

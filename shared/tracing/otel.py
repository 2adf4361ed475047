"""Spans by OpenTelemetry's SDK, sent over HTTP on its own thread; loaded only if traces are exported."""

import logging
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omnirelay.errors import ConfigError
from shared.tracing.timeline import Attributes, Phase

FLUSH_S: Final = 1.0
"""How long the end of a process may wait for its last spans to be sent."""
QUIET_S: Final = 300.0
"""Minimum time between two warnings about the collector."""
MAX_TRACEPARENT: Final = 512
"""Most characters; later versions of the format may be longer than today's 55."""
LAST_SPANS: Final = "last spans"
"""Name of the thread that sends the last spans."""
_EXPORTER: Final = "opentelemetry.exporter"
_SDK: Final = logging.getLogger("opentelemetry")
log = logging.getLogger(__name__)


class Tracer:
    """Makes and sends the spans of a process.

    The SDK queues at most ``OTEL_BSP_MAX_QUEUE_SIZE`` (2048) spans, and then drops the oldest.

    Raises:
        ConfigError: One of OpenTelemetry's environment variables has an invalid value.
    """

    def __init__(self, process: str, url: str, sample_ratio: float) -> None:
        self._complaints = _Complaints(url)
        try:
            self._exporter = _Exporter(url, self._complaints)
            self._processor = BatchSpanProcessor(self._exporter)
            provider = TracerProvider(
                ParentBased(TraceIdRatioBased(sample_ratio)),
                Resource.create({SERVICE_NAME: f"omnirelay-{process}"}),
                shutdown_on_exit=False,
                id_generator=_Ids(),
            )
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"traces cannot be sent with these OTEL_ variables: {error}") from error
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("omnirelay")
        self._form = TraceContextTextMapPropagator()
        self._complaints.listen()
        log.info("traces go to %s", url)

    def begin(self, name: str, traceparent: str | None, began_ns: int, server: bool = False) -> Span | None:
        """Begin a span; None if this trace is not sampled.

        Args:
            traceparent: The parent span in W3C's form; anything else begins a trace.
            began_ns: Its begin, in nanoseconds of Unix time.
            server: It is of a request from outside.
        """
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        span = self._tracer.start_span(name, self._above(traceparent), kind, start_time=began_ns)
        return span if span.is_recording() else None

    def traceparent(self, span: Span) -> str:
        """A span's id in W3C's form, for child spans elsewhere."""
        context = span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(
        self,
        span: Span,
        ended_ns: int,
        phases: Iterable[Phase],
        attributes: Attributes,
        error: str | None = None,
    ) -> None:
        """End a span from :meth:`begin`; each phase becomes a child span, and ``error`` is an error code."""
        above = set_span_in_context(span, Context())
        for phase in phases:
            self._tracer.start_span(phase.name, above, start_time=phase.began_ns).end(phase.ended_ns)
        span.set_attributes(attributes)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR, error)
        span.end(ended_ns)

    def close(self) -> None:
        """Send queued spans, for at most :data:`FLUSH_S`; not at all if the collector does not answer."""
        ended = self._complaints.failing

        def shut_down() -> None:
            self._processor.shutdown()
            ended.set()
            self._complaints.leave()

        threading.Thread(target=shut_down, name=LAST_SPANS, daemon=True).start()
        ended.wait(FLUSH_S)
        self._complaints.silent = True
        # Otherwise it would keep retrying, and the thread would not end.
        self._exporter.shutdown()

    def _above(self, traceparent: str | None) -> Context:
        if traceparent is None or len(traceparent) > MAX_TRACEPARENT or not traceparent.isprintable():
            return Context()
        return self._form.extract({"traceparent": traceparent}, Context())


class _Ids(IdGenerator):
    """Trace and span ids from the system's randomness: vLLM seeds Python's generator alike in every stage."""

    def generate_span_id(self) -> int:
        """Draw a span id."""
        return secrets.randbelow(2**64 - 1) + 1

    def generate_trace_id(self) -> int:
        """Draw a trace id."""
        return secrets.randbelow(2**128 - 1) + 1

    def is_trace_id_random(self) -> bool:
        """Others may sample by it."""
        return True


class _Complaints(logging.Handler):
    """Takes OpenTelemetry's log records, and passes one on every :data:`QUIET_S`.

    Attributes:
        failing: The collector did not take the last spans.
        silent: Nothing is passed on any more.
    """

    def __init__(self, url: str) -> None:
        super().__init__(logging.WARNING)
        self.failing: Final = threading.Event()
        self.silent = False
        self._url = url
        self._quiet_until = 0.0

    def listen(self) -> None:
        """Take all records from now on."""
        _SDK.propagate = False
        _SDK.setLevel(logging.WARNING)
        _SDK.addHandler(self)

    def leave(self) -> None:
        """Take no more records."""
        _SDK.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record."""
        if record.name.startswith(_EXPORTER):
            self.failing.set()
        now = time.monotonic()
        if self.silent or now < self._quiet_until:
            return
        self._quiet_until = now + QUIET_S
        text = "traces cannot be sent to %s (not repeated for %.0f s): %s"
        told = (self._url, QUIET_S, record.getMessage())
        # Not log.warning: Python 3.13 ignores a logger's calls while a handler takes a record.
        log.callHandlers(log.makeRecord(log.name, logging.WARNING, __file__, 0, text, told, None))


class _Exporter(OTLPSpanExporter):
    """OpenTelemetry's exporter, which notes when the collector answers again, and may be shut down twice."""

    def __init__(self, url: str, complaints: _Complaints) -> None:
        super().__init__(url)
        self._complaints = complaints
        self._ended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._complaints.failing.clear()
        return result

    def shutdown(self) -> None:
        """Stop sending and retrying."""
        if not self._ended:
            self._ended = True
            super().shutdown()  # type: ignore[no-untyped-call]

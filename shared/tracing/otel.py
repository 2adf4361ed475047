"""Spans by OpenTelemetry's SDK, sent over HTTP from a thread of its own; loaded only if there are traces."""

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
"""How long the end of a process may wait for its last spans to be taken."""
QUIET_S: Final = 300.0
"""How long nothing more is said of a collector that does not take spans."""
MAX_TRACEPARENT: Final = 512
"""Characters of what a client may say; later versions of the form may be longer than today's 55."""
LAST_SPANS: Final = "last spans"
"""Name of the thread that ends the sending."""
_EXPORTER: Final = "opentelemetry.exporter"
_SDK: Final = logging.getLogger("opentelemetry")
log = logging.getLogger(__name__)


class Tracer:
    """Makes the spans of a process and sends them.

    Spans are queued in memory, at most as many as the SDK holds (``OTEL_BSP_MAX_QUEUE_SIZE``, 2048); for one
    more the oldest is dropped.

    Args:
        process: Which process this is: a stage, or ``gateway``.
        url: Where spans are posted to.
        sample_ratio: Share of the requests that are traced where the client does not decide.

    Raises:
        ConfigError: One of OpenTelemetry's environment variables holds what cannot be used.
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
        """Begin a span.

        Args:
            name: What it is of.
            traceparent: The span above it in W3C's form, or anything else: then it begins a trace.
            began_ns: When, in nanoseconds of Unix time.
            server: It is of a request that came from outside.

        Returns:
            The span, to be ended by :meth:`end`; none if this trace is not to be told.
        """
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        span = self._tracer.start_span(name, self._above(traceparent), kind, start_time=began_ns)
        return span if span.is_recording() else None

    def traceparent(self, span: Span) -> str:
        """Give a span's name in W3C's form, for those who make spans below it."""
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
        """End a span.

        Args:
            span: From :meth:`begin`.
            ended_ns: When.
            phases: What it consisted of; each becomes a span below it.
            attributes: What is told of it.
            error: The code of the error that it ended with.
        """
        above = set_span_in_context(span, Context())
        for phase in phases:
            self._tracer.start_span(phase.name, above, start_time=phase.began_ns).end(phase.ended_ns)
        span.set_attributes(attributes)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR, error)
        span.end(ended_ns)

    def close(self) -> None:
        """Send what waits.

        It takes at most :data:`FLUSH_S`, and no time at all if the collector does not answer: what waits is
        lost then.
        """
        ended = self._complaints.failing

        def shut_down() -> None:
            self._processor.shutdown()
            ended.set()
            self._complaints.leave()

        threading.Thread(target=shut_down, name=LAST_SPANS, daemon=True).start()
        ended.wait(FLUSH_S)
        self._complaints.silent = True
        # Else it would go on trying, and with it the thread.
        self._exporter.shutdown()

    def _above(self, traceparent: str | None) -> Context:
        if traceparent is None or len(traceparent) > MAX_TRACEPARENT or not traceparent.isprintable():
            return Context()
        return self._form.extract({"traceparent": traceparent}, Context())


class _Ids(IdGenerator):
    """Names of traces and spans, drawn by the system.

    Python's own generator is no use: vLLM seeds it with the same number in each stage.
    """

    def generate_span_id(self) -> int:
        """Name a span."""
        return secrets.randbelow(2**64 - 1) + 1

    def generate_trace_id(self) -> int:
        """Name a trace."""
        return secrets.randbelow(2**128 - 1) + 1

    def is_trace_id_random(self) -> bool:
        """Others may sample by it."""
        return True


class _Complaints(logging.Handler):
    """Takes what OpenTelemetry logs, and passes it on now and then.

    Args:
        url: Where spans are posted to.

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
        """Take everything from now on."""
        _SDK.propagate = False
        _SDK.setLevel(logging.WARNING)
        _SDK.addHandler(self)

    def leave(self) -> None:
        """Take nothing any more."""
        _SDK.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        if record.name.startswith(_EXPORTER):
            self.failing.set()
        now = time.monotonic()
        if self.silent or now < self._quiet_until:
            return
        self._quiet_until = now + QUIET_S
        log.warning(
            "traces do not get to %s (not said again for %.0f s): %s",
            self._url,
            QUIET_S,
            record.getMessage(),
        )


class _Exporter(OTLPSpanExporter):
    """OpenTelemetry's exporter, which notes that the collector answers again, and may be shut down twice."""

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
        """Send no more, and stop trying again."""
        if not self._ended:
            self._ended = True
            super().shutdown()  # type: ignore[no-untyped-call]

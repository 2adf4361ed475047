"""The gateway's spans of a request; they hold no content."""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from gateway.requests.lifecycle import Lifecycle, RequestState
from gateway.requests.metrics import RequestMeter, outcome_of
from gateway.requests.record import RequestRecord
from omnirelay.errors import OmniRelayError
from shared.messages import SAMPLE_RATE
from shared.tracing.timeline import Phase

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from shared.tracing.otel import Tracer

_PHASES: Final = {RequestState.RECEIVED: "prepare", RequestState.QUEUED: "queue"}
"""Names of states that no stage reports."""


@dataclass(frozen=True)
class GatewayTraces:
    """Starts the traces of requests."""

    _tracer: "Tracer"
    _model: str

    def begin(self, traceparent: str | None, lifecycle: Lifecycle) -> "RequestTrace | None":
        """Start a request's trace, or continue its client's (not validated yet); none if not sampled."""
        began_ns = round(lifecycle.received_at * 1e9)
        span = self._tracer.begin("request", traceparent, began_ns, server=True)
        return None if span is None else RequestTrace(self._tracer, span, lifecycle, self._model)


class RequestTrace:
    """The gateway's part of one trace; ``traceparent`` is its span, for the stages."""

    def __init__(self, tracer: "Tracer", span: "Span", lifecycle: Lifecycle, model: str) -> None:
        self.traceparent: Final = tracer.traceparent(span)
        self._tracer = tracer
        self._span = span
        self._lifecycle = lifecycle
        self._model = model

    def __str__(self) -> str:
        """The trace id."""
        return self.traceparent.split("-")[1]

    def resumed(self, stage: str, reason: str) -> None:
        """The request is retried."""
        told = {"omnirelay.stage": stage, "omnirelay.reason": reason}
        self._span.add_event("resumed", told, timestamp=time.time_ns())

    def ended(
        self,
        error: BaseException | None,
        record: RequestRecord | None = None,
        meter: RequestMeter | None = None,
    ) -> None:
        """End the span; a rejected request has neither record nor meter."""
        told: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "omnirelay",
            "gen_ai.request.model": self._model,
            "omnirelay.outcome": outcome_of(self._lifecycle, error),
        }
        if record is not None:
            told |= _attributes(record)
        if meter is not None:
            received = self._lifecycle.entered[RequestState.RECEIVED]
            for name, at in (("first_text", meter.first_text), ("first_audio", meter.first_audio)):
                if at is not None:
                    self._span.add_event(name, timestamp=self._unix_ns(at))
                    told[f"omnirelay.{name}_seconds"] = at - received
        entered = self._lifecycle.entered
        phases = [
            Phase(_PHASES[state], self._unix_ns(began), self._unix_ns(ended))
            for (state, began), (_, ended) in pairwise(entered.items())
            if state in _PHASES
        ]
        code = None
        if error is not None and self._lifecycle.state is not RequestState.CANCELLED:
            code = error.code if isinstance(error, OmniRelayError) else OmniRelayError.code
        self._tracer.end(self._span, self._unix_ns(entered[self._lifecycle.state]), phases, told, code)

    def _unix_ns(self, at: float) -> int:
        """Convert from monotonic time."""
        lifecycle = self._lifecycle
        return round((lifecycle.received_at + at - lifecycle.entered[RequestState.RECEIVED]) * 1e9)


def _attributes(record: RequestRecord) -> dict[str, Any]:
    """Attributes of an admitted request, by OpenTelemetry's conventions where they exist."""
    think, text, codec = record.think, record.text, record.codec
    reasons = [stream.finish_reason for stream in (text, codec) if stream.finish_reason is not None]
    return {
        "omnirelay.request.id": record.request_id,
        "gen_ai.output.type": "text" if think.speech is None else "speech",
        "gen_ai.request.max_tokens": think.sampling.max_tokens,
        "gen_ai.request.temperature": think.sampling.temperature,
        "gen_ai.request.seed": think.seed,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": record.prompt.tokens,
        "gen_ai.usage.cache_read.input_tokens": record.prompt.cached_tokens,
        "gen_ai.usage.output_tokens": len(text.token_ids) + len(codec.token_ids),
        "omnirelay.text_tokens": len(text.token_ids),
        "omnirelay.codec_tokens": len(codec.token_ids),
        "omnirelay.audio_seconds": record.audio.samples / SAMPLE_RATE,
        "omnirelay.media_items": len(think.media),
    }

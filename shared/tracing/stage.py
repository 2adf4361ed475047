"""A stage's spans of traced requests."""

from typing import TYPE_CHECKING, Final

from shared.messages import StageName
from shared.tracing.timeline import Attributes, Timeline

if TYPE_CHECKING:
    from shared.tracing.otel import Tracer


class StageTraces:
    """The traced requests of a stage; nothing is kept of others.

    Attributes:
        tracer: Sends the spans; None without traces.
    """

    def __init__(self, stage: StageName) -> None:
        self.tracer: Tracer | None = None
        self._stage: Final = stage
        self._open: dict[str, tuple[str, Timeline]] = {}

    def begin(self, request_id: str, traceparent: str | None, phase: str) -> None:
        """Begin a request's span below the gateway's, with its first phase; without one, it is not traced."""
        if traceparent is not None and self.tracer is not None:
            self._open[request_id] = traceparent, Timeline(phase)

    def enter(self, request_id: str, phase: str, at: float | None = None) -> None:
        """Enter the next phase of a request, now or at a monotonic second."""
        if (request := self._open.get(request_id)) is not None:
            request[1].enter(phase, at)

    def completed(self, request_id: str, attributes: Attributes) -> None:
        """The stage's part of a request is complete."""
        self._end(request_id, "completed", attributes)

    def failed(self, request_id: str, code: str) -> None:
        """A request failed."""
        self._end(request_id, "failed", {}, code)

    def aborted(self, request_id: str) -> None:
        """A request was aborted."""
        self._end(request_id, "aborted", {})

    def _end(self, request_id: str, outcome: str, attributes: Attributes, code: str | None = None) -> None:
        request = self._open.pop(request_id, None)
        if request is None or self.tracer is None:
            return
        traceparent, timeline = request
        phases = timeline.end()
        span = self.tracer.begin(self._stage, traceparent, phases[0].began_ns)
        if span is not None:
            told = {"omnirelay.request.id": request_id, "omnirelay.outcome": outcome, **attributes}
            self.tracer.end(span, phases[-1].ended_ns, phases, told, code)

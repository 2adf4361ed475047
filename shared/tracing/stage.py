"""What a stage tells of the requests whose traces it has a part in."""

from typing import TYPE_CHECKING, Final

from shared.messages import StageName
from shared.tracing.timeline import Attributes, Timeline

if TYPE_CHECKING:
    from shared.tracing.otel import Tracer


class StageTraces:
    """The traces of the requests in work; for a request without one, nothing happens and nothing is kept.

    Args:
        stage: Which stage this is.

    Attributes:
        tracer: Where they are told; none where no traces are told.
    """

    def __init__(self, stage: StageName) -> None:
        self.tracer: Tracer | None = None
        self._stage: Final = stage
        self._open: dict[str, tuple[str, Timeline]] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a request is traced."""
        return request_id in self._open

    def begin(self, request_id: str, traceparent: str | None, phase: str) -> None:
        """A request came.

        Args:
            request_id: Its name.
            traceparent: The gateway's span of it; none if it is not traced.
            phase: What the stage does of it first.
        """
        if traceparent is not None and self.tracer is not None:
            self._open[request_id] = traceparent, Timeline(phase)

    def enter(self, request_id: str, phase: str, at: float | None = None) -> None:
        """Something else is done of a request from now on, or since some monotonic second."""
        if (request := self._open.get(request_id)) is not None:
            request[1].enter(phase, at)

    def completed(self, request_id: str, attributes: Attributes) -> None:
        """The stage's part of a request is done."""
        self._end(request_id, "completed", attributes)

    def failed(self, request_id: str, code: str) -> None:
        """A request ended with an error."""
        self._end(request_id, "failed", {}, code)

    def aborted(self, request_id: str) -> None:
        """A request was given up elsewhere."""
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

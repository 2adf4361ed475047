"""A request that has not ended."""

import asyncio
from dataclasses import dataclass
from typing import Final

from gateway.detokenizer import Detokenizer
from gateway.held import Hold
from gateway.lifecycle import RequestState
from gateway.metrics import RequestMeter
from gateway.record import RequestRecord
from gateway.stream import ResponseStream
from gateway.traces import RequestTrace
from shared.errors import OmniRelayError
from shared.messages import Route, StageName


@dataclass(frozen=True)
class Attempt:
    """One try at a request.

    Attributes:
        id: What the stages call it: the request's name, or that with a number behind.
        route: Who serves it.
    """

    id: str
    route: Route


class Active:
    """What is known of a living request, and the way to its client.

    Attributes:
        attempt: The present one; none while the request waits for the stages.
        resumes: How often it was begun anew.
        not_before: It is not begun anew before then, in monotonic seconds.
        avoid: The replicas where it failed.
        trouble: Why the last attempt ended.
    """

    def __init__(
        self,
        record: RequestRecord,
        stream: ResponseStream,
        detokenizer: Detokenizer,
        timer: asyncio.TimerHandle,
        hold: Hold,
        meter: RequestMeter,
        trace: RequestTrace | None,
    ) -> None:
        self.meter: Final = meter
        self.trace: Final = trace
        self.hold: Final = hold
        self.record: Final = record
        self.stream: Final = stream
        self.detokenizer: Final = detokenizer
        self.timer: Final = timer
        self.attempt: Attempt | None = None
        self.resumes = 0
        self.not_before = 0.0
        self.avoid: Final[set[tuple[StageName, str]]] = set()
        self.trouble: OmniRelayError | None = None

    @property
    def name(self) -> str:
        """What the request goes by in the log."""
        request_id = self.record.request_id
        return request_id if self.trace is None else f"{request_id} (trace {self.trace})"

    def started(self) -> None:
        """The stages have it, for the first time or again."""
        if self.record.lifecycle.state is RequestState.QUEUED:
            self.record.lifecycle.move(RequestState.THINKING)
            self.meter.started()

"""A request that has not ended."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from gateway.fairness.memory_budget import Hold
from gateway.input.detokenizer import Detokenizer
from gateway.requests.lifecycle import RequestState
from gateway.requests.metrics import RequestMeter
from gateway.requests.record import AnswerProgress, RequestRecord
from gateway.requests.response_stream import ResponseStream
from gateway.requests.tracing import RequestTrace
from omnirelay.errors import OmniRelayError
from shared.messages import Route, StageName

APART: Final = 2
"""A request against which so much speaks at a stage is tried apart from others."""


@dataclass
class Suspicion:
    """What speaks against a request at one stage: replicas died while they worked on it.

    Attributes:
        progress: How far the answer was at the last death.
        deaths: How much each death counts, by the replica's name.
        tried_on: The replica on which the present attempt runs apart; none if it does not.
    """

    progress: AnswerProgress
    deaths: dict[str, int] = field(default_factory=dict)
    tried_on: str | None = None

    @property
    def serious(self) -> bool:
        """The request is to be tried apart."""
        return sum(self.deaths.values()) >= APART


@dataclass(frozen=True)
class Attempt:
    """One try at a request.

    Attributes:
        id: What the stages call it: the request's name, or that with a number behind.
        route: Who serves it.
    """

    id: str
    route: Route


class ActiveRequest:
    """What is known of a living request, and the way to its client.

    Attributes:
        attempt: The present one; none while the request waits for the stages.
        resumes: How often it was begun anew.
        interruptions: How often it was taken from the stages, so that others could be tried apart.
        suspicions: The stages whose engine it may have ended.
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
        self.interruptions = 0
        self.suspicions: Final[dict[StageName, Suspicion]] = {}
        self.not_before = 0.0
        self.avoid: Final[set[tuple[StageName, str]]] = set()
        self.trouble: OmniRelayError | None = None

    @property
    def name(self) -> str:
        """What the request goes by in the log."""
        request_id = self.record.request_id
        return request_id if self.trace is None else f"{request_id} (trace {self.trace})"

    @property
    def apart(self) -> set[StageName]:
        """The stages at which it must be alone."""
        return {
            stage
            for stage, suspicion in self.suspicions.items()
            if suspicion.serious and self.record.computes(stage)
        }

    def started(self) -> None:
        """The stages have it, for the first time or again."""
        if self.record.lifecycle.state is RequestState.QUEUED:
            self.record.lifecycle.move(RequestState.THINKING)
            self.meter.started()

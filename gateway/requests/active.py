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
"""From this weight of evidence at a stage on, a request is isolated there."""


@dataclass
class Suspicion:
    """Evidence that a request ends a stage's engines: the weight of each death, by replica.

    Attributes:
        progress: Of the answer, at the last death.
        tried_on: The replica that has said that the current attempt is alone there.
    """

    progress: AnswerProgress
    deaths: dict[str, int] = field(default_factory=dict)
    tried_on: str | None = None

    @property
    def serious(self) -> bool:
        """The request must be isolated."""
        return sum(self.deaths.values()) >= APART


@dataclass(frozen=True)
class Attempt:
    """One try at a request; ``id`` is the request's, after the first with the attempt's number."""

    id: str
    route: Route


@dataclass(eq=False)
class ActiveRequest:
    """A request from admission to its end.

    Attributes:
        attempt: The current one; none while the request waits for replicas.
        interruptions: How often it was taken from the stages without a fault, to make room for others.
        not_before: Earliest monotonic time of the next attempt.
        avoid: Replicas where it failed.
        trouble: Why the last attempt ended.
        near: The thinker that has computed the beginning of the prompt.
        resumable: The client is told what it takes to go on at another gateway.
        continues: The request whose answer this one goes on with.
    """

    record: RequestRecord
    stream: ResponseStream
    detokenizer: Detokenizer
    timer: asyncio.TimerHandle
    hold: Hold
    meter: RequestMeter
    trace: RequestTrace | None
    attempt: Attempt | None = None
    resumes: int = 0
    interruptions: int = 0
    suspicions: dict[StageName, Suspicion] = field(default_factory=dict)
    not_before: float = 0.0
    avoid: set[tuple[StageName, str]] = field(default_factory=set)
    trouble: OmniRelayError | None = None
    near: str | None = None
    resumable: bool = False
    continues: str | None = None

    @property
    def name(self) -> str:
        """For the log: its id, with the trace if it has one."""
        return self.record.request_id + (f" (trace {self.trace})" if self.trace is not None else "")

    def replica(self, stage: StageName) -> str:
        """The replica that serves the current attempt at a stage; empty if none does."""
        return (self.attempt.route.replica(stage) if self.attempt is not None else None) or ""

    @property
    def apart(self) -> set[StageName]:
        """The stages at which it must be isolated."""
        return {
            stage
            for stage, suspicion in self.suspicions.items()
            if suspicion.serious and self.record.computes(stage)
        }

    def started(self) -> None:
        """An attempt has started."""
        if self.record.lifecycle.state is RequestState.QUEUED:
            self.record.lifecycle.move(RequestState.THINKING)
            self.meter.started()

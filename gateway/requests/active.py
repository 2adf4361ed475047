"""A request that has not ended, and its answer as the client's events."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from gateway.fairness.quota import Hold
from gateway.input.detokenizer import Detokenizer
from gateway.requests.lifecycle import RequestState
from gateway.requests.metrics import RequestMeter
from gateway.requests.record import Delta, RequestRecord
from gateway.requests.response_stream import ResponseStream
from gateway.requests.tracing import RequestTrace
from omnirelay.errors import OmniRelayError
from omnirelay.events import AudioEvent, CodecEvent, DoneEvent, TextEvent
from shared.messages import SAMPLE_RATE, CodecDelta, Route, StageName, TextDelta

ENGINE_FAILED, UNEXPLAINED, SUSPECT = 2, 1, 2
"""Weight of a replica's death against the requests that it had, and the sum that makes a request a suspect.

The kernel or an operator may have ended a process that reported nothing.
"""


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
        innocent_resumes: How often another request had ended its attempt.
        deaths: Weight of the deaths of replicas that had it.
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
    innocent_resumes: int = 0
    deaths: dict[tuple[StageName, str], int] = field(default_factory=dict)
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

    def note_death(self, stage: StageName, replica: str, engine_failed: bool) -> None:
        """Count the death of a replica that had the request, if its engine computed it."""
        if self.record.computes(stage):
            weight = ENGINE_FAILED if engine_failed else UNEXPLAINED
            self.deaths[stage, replica] = max(weight, self.deaths.get((stage, replica), 0))

    @property
    def suspected_at(self) -> tuple[StageName, ...]:
        """The stages whose engine it may end."""
        weights = Counter[StageName]()
        for (stage, _), weight in self.deaths.items():
            weights[stage] += weight
        return tuple(stage for stage, weight in weights.items() if weight >= SUSPECT)

    def started(self) -> None:
        """An attempt has started."""
        if self.record.lifecycle.state is RequestState.QUEUED:
            self.record.lifecycle.move(RequestState.THINKING)
            self.meter.started()


def event_of(active: ActiveRequest, delta: Delta) -> TextEvent | CodecEvent | AudioEvent | None:
    """The event of a delta that the record has taken; none if it tells the client nothing."""
    if isinstance(delta, TextDelta):
        return _text_event(active, delta)
    if isinstance(delta, CodecDelta):
        if not active.resumable or not (delta.token_ids or delta.finish_reason):
            return None
        return CodecEvent(token_ids=delta.token_ids, finish_reason=delta.finish_reason)
    number = active.record.audio.chunks - 1
    delay_ms = round(1000 * active.meter.start_delay_s) if number == 0 else 0
    return AudioEvent(seq=number, pcm=bytes(delta.data.view), start_delay_ms=delay_ms)


def done_event(active: ActiveRequest) -> DoneEvent:
    """The last event of a complete answer."""
    record = active.record
    speech = record.think.speech
    return DoneEvent(
        request_id=record.request_id,
        text=active.detokenizer.text,
        prompt_token_ids=record.think.prompt_token_ids,
        text_token_ids=record.text.token_ids,
        codec_token_ids=record.codec.token_ids,
        audio_seconds=record.audio.samples / SAMPLE_RATE,
        finish_reason=record.text.finish_reason or "stop",
        codec_finish_reason=record.codec.finish_reason,
        seed=record.think.seed,
        speaker=speech.speaker if speech else None,
        state_seconds=record.lifecycle.offsets(),
        prompt_tokens=record.prompt.tokens,
        cached_prompt_tokens=record.prompt.cached_tokens,
    )


def _text_event(active: ActiveRequest, delta: TextDelta) -> TextEvent | None:
    text = active.detokenizer.push(delta.token_ids, last=delta.finish_reason is not None)
    if active.detokenizer.stopped:
        active.record.text.finish_reason = "stop"
    reason = active.record.text.finish_reason if active.resumable else None
    if not (delta.token_ids or text or reason):
        return None
    return TextEvent(token_ids=delta.token_ids, text=text, logprobs=delta.logprobs, finish_reason=reason)

"""The gateway's metrics for Prometheus."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal, TypeVar, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.registry import Collector

from gateway.requests.lifecycle import ENDED, Lifecycle, Reason, RequestState, StateCounts
from gateway.requests.record import Delta
from gateway.requests.start_delay import AnswerPace
from omnirelay.errors import BusyError, InvalidRequestError, StageUnavailableError, UnauthenticatedError
from shared.messages import SAMPLE_RATE, STAGES, AudioChunk, StageName, TextDelta

Interface = Literal["tcp", "http"]
Connection = Literal["websocket", "webrtc", "detached"]
ResumeOutcome = Literal["resumed", "taken_over", "refused", "expired"]
CallEnd = Literal["hung_up", "unconnected", "time_limit", "too_fast", "too_slow", "failed"]
Outcome = Literal["computed", "aborted", "failed", "skipped"]
"""How the computation of a beginning of a prompt ended."""
EndVerdict = Literal["finished", "unfinished", "late", "busy", "failed"]
TurnEvent = Literal["started", "stopped", "interrupted", "timed_out", "answered_early", "dropped_early"]

Metric = TypeVar("Metric", Counter, Histogram)

LATE_INTERVALS: Final = 2
"""A heartbeat is late after this many intervals."""
LONG_SPEECH_S: Final = 3.0
"""In shorter speech the time to first audio dominates the real-time factor."""
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DELAYS: Final = (0, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 10)
FACTORS: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 5, 10)

TURNED_AWAY: Final = (BusyError, StageUnavailableError, UnauthenticatedError)
"""Errors for which the request itself is not to blame."""

# A creation timestamp per counter would double the scrape; Prometheus detects restarts without it.
disable_created_metrics()


def outcome_of(lifecycle: Lifecycle, error: BaseException | None) -> str:
    """How a request ended: ``refused`` if by the client's fault, or turned away before admission."""
    refused = isinstance(error, InvalidRequestError | BusyError | UnauthenticatedError) or (
        isinstance(error, StageUnavailableError) and RequestState.QUEUED not in lifecycle.entered
    )
    return "refused" if lifecycle.state is RequestState.FAILED and refused else lifecycle.state.value


class GatewayMetrics:
    """All metrics of one gateway, in a registry of its own, with those of other collectors."""

    def __init__(self, counts: StateCounts, *collectors: Collector) -> None:
        self._counts = counts
        self.registry: Final = CollectorRegistry()
        self._outcomes = self._counter(
            "requests",
            "Requests that ended, by `outcome`; `refused` ones were invalid or over a limit.",
            outcome=(*sorted(state.value for state in ENDED), "refused"),
        )
        self._errors = self._counter(
            "client_errors",
            "Errors sent to clients, by `interface` (TCP or HTTP) and error `code`.",
            interface=get_args(Interface),
            code=[error.code for error in TURNED_AWAY],
        )
        self.restarts: Final = self._counter("stage_restarts", "Replaced processes of a stage.", stage=STAGES)
        self.continued: Final = self._counter(
            "requests_continued", "Requests that continued an answer whose connection was lost."
        )
        self.resumes: Final = self._counter(
            "request_resumes",
            "Resumed requests, by the stage that lost them and the `reason`; `left`: after its drain time; "
            "`cut off`: its connection ended.",
            stage=STAGES,
            reason=get_args(Reason),
        )
        self._late = self._counter("heartbeats_late", "Late heartbeats of a stage.", stage=STAGES)
        self.queue = self._histogram("queue_seconds", "From a finished prompt to a place at the stages.")
        self.first_text = self._histogram("time_to_first_text_seconds", "From a request to its first text.")
        self.first_audio = self._histogram(
            "time_to_first_audio_seconds", "From a request to its first audio."
        )
        self.start_delay = self._histogram(
            "start_delay_seconds", "Time that clients are advised to wait with the first audio.", DELAYS
        )
        self.request = self._histogram("request_seconds", "Time from a request until it was completed.")
        self.real_time = self._histogram(
            "real_time_factor",
            "Time at the stages per second of speech; `speech` is `long` from 3 s on, else `short`.",
            FACTORS,
            speech=("short", "long"),
        )
        self.abort = self._histogram("abort_seconds", "From an abort until the last stage confirmed it.")
        self.underruns = self._counter("playback_underruns", "Gaps in the playback of streamed speech.")
        self.silence = self._counter("playback_silence_seconds", "Length of those gaps.")
        self.audio = self._counter("audio_seconds", "Speech received from the stages.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, media included.")
        self.prefills: Final = self._counter(
            "early_prefills",
            "Early prompts by `outcome`; `aborted` ones lost their recording, `skipped` ones found no room.",
            outcome=get_args(Outcome),
        )
        self._turns = self._counter(
            "realtime_turns",
            "Turns of realtime sessions by `event`; `timed_out`: nobody spoke; `answered_early`: in the "
            "pause that ended the turn; `dropped_early`: so, but the user went on.",
            event=get_args(TurnEvent),
        )
        self.sessions: Final = Gauge(
            "omnirelay_realtime_sessions",
            "Open realtime sessions; by `connection`, `detached` ones wait for their client.",
            ["connection"],
            registry=self.registry,
        )
        for connection in get_args(Connection):
            self.sessions.labels(connection)
        self.session_resumes: Final = self._counter(
            "realtime_resumes",
            "Realtime sessions that lost their connection, by `outcome`; `taken_over`: before the gateway "
            "noticed it; `expired`: no client came in time; `refused`: not the client's session.",
            outcome=get_args(ResumeOutcome),
        )
        self.calls: Final = self._counter(
            "realtime_calls",
            "Ended calls, by `end`; `unconnected`: no media within 15 s; `time_limit`: also of idle calls; "
            "`too_fast`: audio faster than speech; `too_slow`: events were not read.",
            end=get_args(CallEnd),
        )
        self.turn_detection = self._counter("turn_detection_seconds", "CPU time of turn detection.")
        self.turn_ends: Final = self._counter(
            "turn_ends_heard",
            "Pauses that the turn model heard, by `verdict`; silence ended the turn if it was "
            "`late` (0.4 s), `busy` (16 others waited) or `failed`.",
            verdict=get_args(EndVerdict),
        )
        self.text_tokens = self._counter("text_tokens", "Text tokens, end tokens included.")
        self.codec_tokens = self._counter("codec_tokens", "Codec tokens.")
        for collector in (counts, *collectors):
            self.registry.register(collector)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def told(self, interface: Interface, code: str) -> None:
        """An error was sent to a client."""
        self._errors.labels(interface, code).inc()

    def ended(self, lifecycle: Lifecycle, error: BaseException | None = None) -> None:
        """A request ended or was rejected."""
        outcome = outcome_of(lifecycle, error)
        self._outcomes.labels(outcome).inc()
        self._counts.refused += outcome == "refused"

    def turn(self, event: TurnEvent) -> None:
        """A turn of a realtime session began or ended, or what else followed from turn detection."""
        self._turns.labels(event).inc()

    def heartbeat(self, stage: StageName, since_last_s: float | None, interval_s: float) -> None:
        """A heartbeat arrived."""
        if since_last_s is not None and since_last_s > LATE_INTERVALS * interval_s:
            self._late.labels(stage).inc()

    def _counter(self, name: str, what: str, **labels: Iterable[str]) -> Counter:
        return _with_series(Counter(f"omnirelay_{name}", what, labels, registry=self.registry), labels)

    def _histogram(
        self, name: str, what: str, buckets: tuple[float, ...] = SECONDS, **labels: Iterable[str]
    ) -> Histogram:
        histogram = Histogram(f"omnirelay_{name}", what, labels, buckets=buckets, registry=self.registry)
        return _with_series(histogram, labels)


def _with_series(metric: Metric, labels: dict[str, Iterable[str]]) -> Metric:
    """Begin the series of all combinations of label values that are known: they are 0, not absent."""
    if labels:
        for values in product(*labels.values()):
            metric.labels(*values)
    return metric


@dataclass(eq=False)
class RequestMeter:
    """Measures one request.

    Attributes:
        pace: Estimates the start delay; none for speech that comes in one piece.
        start_delay_s: How long the client is advised to wait with the first audio.
        first_text: Monotonic time of the first text.
        first_audio: Monotonic time of the first audio.
    """

    _metrics: GatewayMetrics
    _lifecycle: Lifecycle
    _clock: Callable[[], float] = time.monotonic
    pace: AnswerPace | None = None
    start_delay_s: float = 0.0
    first_text: float | None = None
    first_audio: float | None = None
    _prompt_counted: bool = False
    _heard_until: float | None = None
    _audio_seconds: float = 0.0

    def started(self) -> None:
        """The request left the queue."""
        entered = self._lifecycle.entered
        self._metrics.queue.observe(entered[RequestState.THINKING] - entered[RequestState.QUEUED])

    def given(self, tokens: int) -> None:
        """The request brought the whole text of the answer."""
        if self.pace is not None:
            self.pace.text(tokens, last=True)

    def take(self, delta: Delta) -> None:
        """A part of the answer arrived."""
        metrics = self._metrics
        if isinstance(delta, TextDelta):
            if delta.prompt is not None and not self._prompt_counted:
                self._prompt_counted = True
                metrics.prompt_tokens.inc(delta.prompt.tokens)
            metrics.text_tokens.inc(len(delta.token_ids))
            if self.pace is not None:
                self.pace.text(len(delta.token_ids), last=delta.finish_reason is not None)
            if delta.token_ids and self.first_text is None:
                self.first_text = self._clock()
                metrics.first_text.observe(self._age(self.first_text))
        elif isinstance(delta, AudioChunk):
            self._take_audio(delta.samples / SAMPLE_RATE, delta.last)
        else:
            metrics.codec_tokens.inc(len(delta.token_ids))
            if self.pace is not None:
                self.pace.codes(len(delta.token_ids))

    def ended(self, error: BaseException | None) -> None:
        """The request ended."""
        lifecycle = self._lifecycle
        self._metrics.ended(lifecycle, error)
        if lifecycle.state is RequestState.COMPLETED:
            entered = lifecycle.entered
            served = entered[RequestState.COMPLETED] - entered[RequestState.THINKING]
            self._metrics.request.observe(self._age(self._clock()))
            if self.pace is not None:
                self.pace.ended()
            if self._audio_seconds:
                length = "long" if self._audio_seconds >= LONG_SPEECH_S else "short"
                self._metrics.real_time.labels(length).observe(served / self._audio_seconds)

    def _take_audio(self, seconds: float, last: bool) -> None:
        if not seconds:
            return
        now = self._clock()
        if self.pace is not None and (delay := self.pace.audio(seconds, last)) is not None:
            self.start_delay_s = delay
            self._metrics.start_delay.observe(delay)
        if self._heard_until is None:
            self.first_audio = now
            self._metrics.first_audio.observe(self._age(now))
        elif now > self._heard_until:
            self._metrics.underruns.inc()
            self._metrics.silence.inc(now - self._heard_until)
        self._heard_until = max(now, self._heard_until or now + self.start_delay_s) + seconds
        self._audio_seconds += seconds
        self._metrics.audio.inc(seconds)

    def _age(self, at: float) -> float:
        return at - self._lifecycle.entered[RequestState.RECEIVED]

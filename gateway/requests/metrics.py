"""The gateway's metrics for Prometheus, described in docs/metrics.md."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Final, Literal, Protocol, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.requests.lifecycle import ENDED, Lifecycle, Reason, RequestState, StateCounts
from gateway.requests.record import Delta
from gateway.requests.start_delay import AnswerPace
from omnirelay.errors import (
    BusyError,
    InvalidRequestError,
    OmniRelayError,
    StageUnavailableError,
    UnauthenticatedError,
)
from omnirelay.status import StageState
from shared.messages import SAMPLE_RATE, STAGES, AudioChunk, StageName, TextDelta

Interface = Literal["tcp", "http"]
Connection = Literal["websocket", "webrtc"]
CallEnd = Literal["hung_up", "unconnected", "time_limit", "too_fast", "too_slow", "failed"]
TurnEvent = Literal["started", "stopped", "interrupted", "timed_out", "answered_early", "dropped_early"]

LATE_INTERVALS: Final = 2
"""A heartbeat is late after this many intervals."""
LONG_SPEECH_S: Final = 3.0
"""In shorter speech the time to first audio dominates the real-time factor."""
SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
DELAYS: Final = (0, 0.1, 0.25, 0.5, 1, 1.5, 2, 3, 4, 5, 10)
FACTORS: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.25, 1.5, 2, 3, 5, 10)

PREFILL_OUTCOMES: Final = ("computed", "aborted", "failed", "skipped")
TURNED_AWAY: Final[tuple[type[OmniRelayError], ...]] = (
    BusyError,
    StageUnavailableError,
    UnauthenticatedError,
)
"""Errors for which the request itself is not to blame."""

# A creation timestamp per counter would double the scrape; Prometheus detects restarts without it.
disable_created_metrics()


class StageStates(Protocol):
    """See :class:`gateway.dispatch.registry.StageRegistry`."""

    @property
    def stages(self) -> Sequence[StageName]:
        """The configured stages."""
        ...

    def state(self, stage: StageName) -> StageState:
        """A stage's state: the best of its replicas'."""
        ...

    def count(self, stage: StageName, state: StageState) -> int:
        """Number of a stage's replicas in a state."""
        ...


def outcome_of(lifecycle: Lifecycle, error: BaseException | None) -> str:
    """How a request ended.

    One that failed through the client's fault, or was rejected before admission, counts as ``refused``.
    """
    taken = RequestState.QUEUED in lifecycle.entered
    refused = isinstance(error, InvalidRequestError | BusyError | UnauthenticatedError) or (
        not taken and isinstance(error, TURNED_AWAY)
    )
    return "refused" if lifecycle.state is RequestState.FAILED and refused else lifecycle.state.value


class GatewayMetrics:
    """All metrics of one gateway, in a registry of its own."""

    def __init__(self, counts: StateCounts, stages: StageStates) -> None:
        self.registry: Final = CollectorRegistry()
        self._outcomes = self._counter("requests", "Requests that ended.", ["outcome"])
        self._errors = self._counter("client_errors", "Errors sent to clients.", ["interface", "code"])
        self._restarts = self._counter("stage_restarts", "Detected restarts of a stage.", ["stage"])
        self.continued: Final = self._counter(
            "requests_continued", "Requests that went on with a partial answer that their client had."
        )
        self._resumes = self._counter(
            "request_resumes", "Retries after a stage was lost or failed.", ["stage", "reason"]
        )
        self._late = self._counter("heartbeats_late", "Late heartbeats of a stage.", ["stage"])
        self.queue = self._histogram("queue_seconds", "Time in the queue.")
        self.first_text = self._histogram("time_to_first_text_seconds", "Time to the first text.")
        self.first_audio = self._histogram("time_to_first_audio_seconds", "Time to the first audio.")
        self.start_delay = self._histogram(
            "start_delay_seconds", "Time that a client is advised to wait with the first audio.", DELAYS
        )
        self.request = self._histogram("request_seconds", "Time to the end of a completed request.")
        self.real_time = self._histogram(
            "real_time_factor",
            "Processing time per second of speech.",
            FACTORS,
            ["speech"],
        )
        self.abort = self._histogram("abort_seconds", "Time until all stages had dropped an aborted request.")
        self.underruns = self._counter("playback_underruns", "Gaps in the playback of streamed speech.")
        self.silence = self._counter("playback_silence_seconds", "Length of those gaps.")
        self.audio = self._counter("audio_seconds", "Speech sent to clients.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens, media included.")
        self._prefills = self._counter("early_prefills", "Beginnings of prompts that ended.", ["outcome"])
        self._turns = self._counter(
            "realtime_turns", "Turns of realtime sessions that were detected.", ["event"]
        )
        self.sessions: Final = Gauge(
            "omnirelay_realtime_sessions", "Open realtime sessions.", ["connection"], registry=self.registry
        )
        self._calls = self._counter("realtime_calls", "Calls by WebRTC that ended.", ["end"])
        self.turn_detection = self._counter(
            "turn_detection_seconds", "Time of a core that the detection of turns took."
        )
        self.text_tokens = self._counter("text_tokens", "Generated text tokens.")
        self.codec_tokens = self._counter("codec_tokens", "Generated codec tokens.")
        for stage in STAGES:
            self._restarts.labels(stage)
            self._late.labels(stage)
            for reason in get_args(Reason):
                self._resumes.labels(stage, reason)
        for outcome in PREFILL_OUTCOMES:
            self._prefills.labels(outcome)
        for event in get_args(TurnEvent):
            self._turns.labels(event)
        for connection in get_args(Connection):
            self.sessions.labels(connection)
        for end in get_args(CallEnd):
            self._calls.labels(end)
        for length in ("short", "long"):
            self.real_time.labels(length)
        for interface, error in product(get_args(Interface), TURNED_AWAY):
            self._errors.labels(interface, error.code)
        for outcome in (*sorted(state.value for state in ENDED), "refused"):
            self._outcomes.labels(outcome)
        self.registry.register(_Now(counts, stages))
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def told(self, interface: Interface, code: str) -> None:
        """An error was sent to a client."""
        self._errors.labels(interface, code).inc()

    def ended(self, lifecycle: Lifecycle, error: BaseException | None = None) -> None:
        """A request ended or was rejected."""
        self._outcomes.labels(outcome_of(lifecycle, error)).inc()

    def prefilled(self, outcome: str) -> None:
        """The computation of a beginning of a prompt ended, or was not begun."""
        self._prefills.labels(outcome).inc()

    def turn(self, event: TurnEvent) -> None:
        """A turn of a realtime session began or ended, or what else followed from turn detection."""
        self._turns.labels(event).inc()

    def call_ended(self, end: CallEnd) -> None:
        """A call ended; ``time_limit`` is that of calls, or of those in which nothing happens."""
        self._calls.labels(end).inc()

    def restarted(self, stage: StageName) -> None:
        """A process replaced one of a stage."""
        self._restarts.labels(stage).inc()

    def resumed(self, stage: StageName, reason: Reason) -> None:
        """A request is retried."""
        self._resumes.labels(stage, reason).inc()

    def heartbeat(self, stage: StageName, since_last_s: float | None, interval_s: float) -> None:
        """A heartbeat arrived."""
        if since_last_s is not None and since_last_s > LATE_INTERVALS * interval_s:
            self._late.labels(stage).inc()

    def _counter(self, name: str, what: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"omnirelay_{name}", what, labels, registry=self.registry)

    def _histogram(
        self, name: str, what: str, buckets: tuple[float, ...] = SECONDS, labels: Iterable[str] = ()
    ) -> Histogram:
        return Histogram(f"omnirelay_{name}", what, labels, buckets=buckets, registry=self.registry)


class RequestMeter:
    """Measures one request.

    Attributes:
        first_text: Monotonic time of the first text.
        first_audio: Monotonic time of the first audio.
        start_delay_s: How long the client is advised to wait with it.

    Args:
        pace: Estimates that; none for speech that comes in one piece.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        lifecycle: Lifecycle,
        clock: Callable[[], float] = time.monotonic,
        pace: AnswerPace | None = None,
    ) -> None:
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._clock = clock
        self._pace = pace
        self.start_delay_s = 0.0
        self.first_text: float | None = None
        self.first_audio: float | None = None
        self._prompt_counted = False
        self._heard_until: float | None = None
        self._audio_seconds = 0.0

    def started(self) -> None:
        """The request left the queue."""
        entered = self._lifecycle.entered
        self._metrics.queue.observe(entered[RequestState.THINKING] - entered[RequestState.QUEUED])

    def take(self, delta: Delta) -> None:
        """A part of the answer arrived."""
        metrics = self._metrics
        if isinstance(delta, TextDelta):
            if delta.prompt is not None and not self._prompt_counted:
                self._prompt_counted = True
                metrics.prompt_tokens.inc(delta.prompt.tokens)
            metrics.text_tokens.inc(len(delta.token_ids))
            if self._pace is not None:
                self._pace.text(len(delta.token_ids), last=delta.finish_reason is not None)
            if delta.token_ids and self.first_text is None:
                self.first_text = self._clock()
                metrics.first_text.observe(self._age(self.first_text))
        elif isinstance(delta, AudioChunk):
            self._take_audio(delta.samples / SAMPLE_RATE, delta.last)
        else:
            metrics.codec_tokens.inc(len(delta.token_ids))
            if self._pace is not None:
                self._pace.codes(len(delta.token_ids))

    def ended(self, error: BaseException | None) -> None:
        """The request ended."""
        lifecycle = self._lifecycle
        self._metrics.ended(lifecycle, error)
        if lifecycle.state is RequestState.COMPLETED:
            entered = lifecycle.entered
            served = entered[RequestState.COMPLETED] - entered[RequestState.THINKING]
            self._metrics.request.observe(self._age(self._clock()))
            if self._pace is not None:
                self._pace.ended()
            if self._audio_seconds:
                length = "long" if self._audio_seconds >= LONG_SPEECH_S else "short"
                self._metrics.real_time.labels(length).observe(served / self._audio_seconds)

    def _take_audio(self, seconds: float, last: bool) -> None:
        if not seconds:
            return
        now = self._clock()
        if self._pace is not None and (delay := self._pace.audio(seconds, last)) is not None:
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


class _Now(Collector):
    def __init__(self, counts: StateCounts, stages: StageStates) -> None:
        self._counts = counts
        self._stages = stages

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """See :class:`prometheus_client.registry.Collector`."""
        requests = GaugeMetricFamily("omnirelay_requests", "Open requests by state.", labels=["state"])
        for state, number in self._counts.report().items():
            if RequestState(state) not in ENDED:
                requests.add_metric([state], number)
        up = GaugeMetricFamily(
            "omnirelay_stage_up", "1 for a stage with a replica that is ready, else 0.", labels=["stage"]
        )
        for stage in self._stages.stages:
            up.add_metric([stage], float(self._stages.state(stage) == "ready"))
        replicas = GaugeMetricFamily(
            "omnirelay_stage_replicas", "Replicas of a stage by state.", labels=["stage", "state"]
        )
        for stage, state in product(self._stages.stages, get_args(StageState)):
            replicas.add_metric([stage, state], self._stages.count(stage, state))
        return [requests, up, replicas]

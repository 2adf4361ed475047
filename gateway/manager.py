"""Requests from submission to their last event."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gateway.access.account import ClientAccount
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.prefills import Prefills
from gateway.dispatch.registry import StageRegistry
from gateway.dispatch.replica_monitor import ReplicaMonitor
from gateway.dispatch.stage_transport import StageTransport
from gateway.fairness.admission import Admission
from gateway.fairness.quota import Hold, MemoryBudget
from gateway.input.prompt import PromptBuilder
from gateway.intake import RequestIntake
from gateway.requests.active import ActiveRequest, done_event, event_of
from gateway.requests.history import RequestHistory, RequestReport, report_of
from gateway.requests.lifecycle import Lifecycle, RequestState, StateCounts, late_error, state_after
from gateway.requests.metrics import GatewayMetrics, Outcome, RequestMeter
from gateway.requests.record import Delta, RequestRecord
from gateway.requests.response_stream import ResponseStream
from gateway.requests.start_delay import SpeechHistory, pace_of
from gateway.requests.tracing import GatewayTraces, RequestTrace
from gateway.validation import Validator
from omnirelay import error_codes
from omnirelay.errors import (
    BusyError,
    CancelledRequestError,
    OmniRelayError,
    SequenceError,
    SlowClientError,
    StageFailedError,
    StoppingError,
)
from omnirelay.protocol import GenerateRequest, PartialAnswer
from shared.config import Config
from shared.log import LIMITED, limited, of_request
from shared.messages import GATEWAY_NAME_BYTES, RequestFailed, StageEvent

if TYPE_CHECKING:
    from gateway.input.fetch import Fetcher

MIN_RETRY_STOPPING_MS: Final = 1000
"""A restart takes at least this long."""
log = logging.getLogger(__name__)


class Gateway:
    """Owns all requests; alone decides when one ends.  Runs on the event loop's thread, without locks.

    Attributes:
        name: Random; prefix of its request ids.
        prompts: The checkpoint's tokenizer and chat template.
        validator: Knows voices and limits.
        monitor: Takes what replicas say of themselves.
        intake: Builds prompts.
        stopping: It takes no more requests.
    """

    def __init__(
        self,
        config: Config,
        prompts: PromptBuilder,
        stages: StageTransport,
        fetch: "Fetcher | None" = None,
        traces: GatewayTraces | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings, limits = config.gateway, config.gateway.limits
        self.name: Final = secrets.token_hex(GATEWAY_NAME_BYTES)
        self.registry: Final = StageRegistry(
            settings.heartbeat_timeout_s, settings.step_timeout_s, self.name, clock, config.served_stages
        )
        self.counts: Final = StateCounts()
        self.metrics: Final = GatewayMetrics(self.counts, self.registry)
        self.dispatcher: Final = Dispatcher(
            settings, self.registry, self.metrics, stages, self._close_request, self._leave_thinker, clock
        )
        self.prefills: Final = Prefills(
            self.registry, stages, self.dispatcher.aborts, self.metrics, limits.early_prompt_tokens
        )
        self.monitor: Final = ReplicaMonitor(
            self.name, config, self.registry, self.metrics, stages, self.dispatcher
        )
        self.dropped_events = 0
        self.prompts: Final = prompts
        self._traces = traces
        self.validator: Final = Validator(settings, self.registry, prompts)
        self._admission = Admission(limits.max_active, limits.max_queued)
        self.held: Final = MemoryBudget(limits.held_bytes, self._admission.retry_after_ms)
        self.intake: Final = RequestIntake(self.name, self.validator, prompts, config.media, fetch)
        self._active: dict[str, ActiveRequest] = {}
        self._history = RequestHistory()
        self._spoken = SpeechHistory()
        self._shares_caches = settings.share_prefix_cache
        self._max_start_delay_s = settings.max_start_delay_s
        self._clock = clock
        self._ends_at = 0.0
        self.stopping = False
        self._closed = False

    async def submit(
        self, request: GenerateRequest, account: ClientAccount, near: str | None = None
    ) -> ResponseStream:
        """Take a request, by the thinker ``near`` if possible, or raise a RequestError; close its stream."""
        lifecycle = Lifecycle(self.counts)
        trace = self._traces.begin(request.traceparent, lifecycle) if self._traces is not None else None
        hold = self.held.of(account.share)
        account_open = False
        try:
            if self.stopping:
                left_ms = round(1000 * (self._ends_at - self._clock()))
                raise StoppingError(
                    "the gateway is stopping and takes no more requests: reconnect and retry",
                    max(MIN_RETRY_STOPPING_MS, left_ms),
                )
            if request.resume is not None:
                self._end_earlier(request.resume, account)
            account.open()
            account_open = True
            return await self._admit(account.allowed(request), account, lifecycle, hold, trace, near)
        except BaseException as error:
            hold.release()
            if account_open:
                account.end()
            lifecycle.move(state_after(error))
            self.metrics.ended(lifecycle, error)
            if trace is not None:
                trace.ended(error)
            what = "a request" if trace is None else f"a request (trace {trace})"
            if isinstance(error, asyncio.CancelledError):
                log.debug("%s of %s was cancelled before it was taken", what, account.name)
            else:
                why = error.for_log if isinstance(error, OmniRelayError) else type(error).__name__
                limited(log).info("refused %s of %s: %s", what, account.name, why)
            raise

    def has_room(self, account: ClientAccount) -> bool:
        """Whether a client's request that may be cancelled soon delays no other."""
        return not self.stopping and account.client.known and self._admission.has_room

    async def compute_early(
        self, request: GenerateRequest, account: ClientAccount, client: str, thinker: str, goes_on: bool
    ) -> Outcome:
        """Have a thinker, told by :attr:`prefills`, compute the prompt of a request that may come.

        Args:
            client: Whose allowance is used.
            goes_on: The last item is a recording that goes on.
        """
        if self.stopping or not account.client.known or self._admission.has_queued:
            return self.prefills.counted("skipped")
        hold = self.held.of(account.share)
        try:
            begun = await self.intake.beginning(request, hold, goes_on, self._cache_salt(account))
            return await self.prefills.compute(begun, client, thinker)
        except OmniRelayError as error:
            # A request like it would be told.
            log.debug("a beginning was not computed: %s", error)
            return self.prefills.counted("skipped" if isinstance(error, BusyError) else "failed")
        finally:
            hold.release()

    def cancel(self, request_id: str, reason: str = "the client cancelled the request") -> None:
        """Cancel a request, unless it has ended."""
        if (active := self._active.get(request_id)) is not None:
            self._end(active, RequestState.CANCELLED, CancelledRequestError(reason))

    def report(self, request_id: str) -> RequestReport | None:
        """Describe a request; none if it is unknown, or ended too long ago."""
        if (active := self._active.get(request_id)) is not None:
            return report_of(active.record, active.resumes)
        return self._history.get(request_id)

    def on_event(self, event: StageEvent) -> None:
        """Take a stage's message about a request."""
        if event.request_id in self.prefills:
            self.prefills.take(event)
            return
        active = self.dispatcher.of(event.request_id)
        if active is None:
            # Normal after an abort: the stage had already sent it.
            self.dropped_events += 1
            log.debug("dropped an event of request %s, which is not at the stages", event.request_id)
        elif isinstance(event, RequestFailed):
            self.dispatcher.attempt_failed(active, event)
        else:
            self._take(active, event)

    def start_waiting(self) -> None:
        """Dispatch queued requests while there is room at the stages; call it periodically."""
        speech = True
        while not self._closed and (request_id := self._admission.next(speech)) is not None:
            active = self._active[request_id]
            speaks = active.record.think.speech is not None
            try:
                if not self.dispatcher.begin(active):
                    if not speaks:
                        return
                    # Text need not wait for the stages of speech.
                    speech = False
                    continue
            except Exception:
                # The caller may be the ticker, or the submission of another client's request.
                log.exception("request %s could not be placed", active.name, extra=LIMITED)
                self._end(active, RequestState.FAILED, OmniRelayError("see the gateway's log"))
                continue
            self._admission.start(request_id)
            if active.attempt is None:
                self._leave_thinker(active)

    def check_stages(self) -> None:
        """Detect lost replicas and retry their requests; call it periodically."""
        self.monitor.check()
        thinker, *others = self.registry.stages
        self._admission.follow(self.registry.batch([thinker]), self.registry.batch(others))
        self.prefills.check()
        self.dispatcher.begin_waiting()

    def drain(self, grace_s: float) -> None:
        """Take no more requests; open ones may finish for ``grace_s`` until :meth:`close`."""
        self.stopping = True
        self._ends_at = self._clock() + grace_s
        self.monitor.drain()

    def close(self) -> None:
        """Cancel all requests and take no more."""
        self.stopping = self._closed = True
        for request_id in list(self._active):
            self.cancel(request_id, "the gateway is shutting down")
        self.monitor.close()
        self.intake.close()

    async def _admit(
        self,
        request: GenerateRequest,
        account: ClientAccount,
        lifecycle: Lifecycle,
        hold: Hold,
        trace: RequestTrace | None,
        near: str | None,
    ) -> ResponseStream:
        self.validator.check_stages(request)
        speaker = self.validator.speaker(request)
        deadline_s = self.validator.deadline_s(request)
        traceparent = trace.traceparent if trace is not None else None
        codec = self.registry.codec()
        loop = asyncio.get_running_loop()
        due = loop.time() + deadline_s
        with self._admission.preparing(account.share):
            try:
                async with asyncio.timeout_at(due):
                    salt = self._cache_salt(account)
                    think = await self.intake.request(request, speaker, hold, traceparent, salt)
                    partial = await self.intake.given(request, think, account.share, codec)
            except TimeoutError as error:
                raise late_error(lifecycle.state, deadline_s) from error
        if self._closed:
            raise CancelledRequestError("the gateway is shutting down")
        if request.resume is not None:
            # Again: another may have been admitted meanwhile.
            self._end_earlier(request.resume, account)
        request_id = think.request_id
        self._admission.enter(request_id, think.priority, account.share, think.speech is not None)
        lifecycle.move(RequestState.QUEUED)
        pace = None
        if request.resume is None:
            pace = pace_of(self._spoken, think.speech, codec, self._max_start_delay_s)
        active = ActiveRequest(
            RequestRecord(think, lifecycle, partial, codec),
            ResponseStream(request_id, account, self.cancel, think.seed if request.resumable else None),
            self.prompts.detokenizer(request.stop),
            loop.call_at(due, self._expire, request_id, deadline_s),
            hold,
            RequestMeter(self.metrics, lifecycle, pace=pace),
            trace,
            near=near,
            resumable=request.resumable,
        )
        self._active[request_id] = active
        try:
            whole = partial is not None and self._go_on(active, request.resume)
        except BaseException:
            # Nothing else ends a request whose client gets no stream.
            active.timer.cancel()
            del self._active[request_id]
            self._admission.leave(request_id)
            raise
        if not whole:
            self.start_waiting()
        return active.stream

    def _cache_salt(self, account: ClientAccount) -> str | None:
        """Return the name under which the thinker caches a client's prompts: its key's, if it has one."""
        keyed = account.client.keyed and not self._shares_caches
        return account.client.name if keyed else None

    def _end_earlier(self, partial: PartialAnswer, account: ClientAccount) -> None:
        """End what this client still has open of an answer that it goes on with: each has one request."""
        name = partial.request_id
        for request_id, earlier in list(self._active.items()):
            if earlier.stream.belongs_to(account) and name in (request_id, earlier.continues):
                self.cancel(request_id, "the client goes on with the answer by another request")

    def _go_on(self, active: ActiveRequest, earlier: PartialAnswer | None) -> bool:
        """Begin behind what there is of the answer; return whether nothing is missing, and it has ended."""
        record, about = active.record, of_request(active.record.request_id)
        if earlier is None:
            active.meter.given(len(record.text.token_ids))
        else:
            self.metrics.continued.inc()
            log.info("request %s goes on with the answer of %s", active.name, earlier.request_id, extra=about)
            active.continues = earlier.request_id
        active.detokenizer.push(record.text.token_ids, last=record.text.ended)
        if active.detokenizer.stopped:
            record.text.finish_reason = "stop"
        if not record.is_whole:
            return False
        active.started()
        record.advance()
        self._complete(active)
        return True

    def _take(self, active: ActiveRequest, delta: Delta) -> None:
        record = active.record
        try:
            record.apply(delta)
            active.meter.take(delta)
            if (event := event_of(active, delta)) is not None:
                active.stream.push(event)
            record.advance()
        except SequenceError as error:
            self.dispatcher.retry(active, delta.stage, "failed", StageFailedError(str(error)))
        except SlowClientError as error:
            self._end(active, RequestState.FAILED, error)
        else:
            if record.lifecycle.state is RequestState.COMPLETED:
                self._complete(active)
            if not record.needs("thinker") and self._admission.leave_thinker(record.request_id):
                self.start_waiting()

    def _complete(self, active: ActiveRequest) -> None:
        done, about = done_event(active), of_request(active.record.request_id)
        seconds = done.state_seconds
        log.info("request %s completed after %.3f s", active.name, seconds["completed"], extra=about)
        # The thinker does not know of a stop.
        self.dispatcher.end(active, completed=not active.detokenizer.stopped)
        self._remove(active, seconds["completed"] - seconds["thinking"], None)
        active.stream.finish(done)

    def _end(self, active: ActiveRequest, state: RequestState, error: OmniRelayError) -> None:
        """End a request without an answer: abort it at the stages, and tell the client."""
        self.dispatcher.end(active)
        self._close_request(active, error, state)

    def _close_request(
        self, active: ActiveRequest, error: OmniRelayError, state: RequestState = RequestState.FAILED
    ) -> None:
        """End a request that the dispatcher has removed."""
        lifecycle, about = active.record.lifecycle, of_request(active.record.request_id)
        level = logging.INFO if state is RequestState.CANCELLED else logging.WARNING
        told = "request %s %s from %s: %s"
        log.log(level, told, active.name, state, lifecycle.state, error.for_log, extra=about)
        lifecycle.move(state)
        self._remove(active, None, error)
        active.stream.finish(error_codes.to_event(error), drop_waiting=isinstance(error, SlowClientError))

    def _leave_thinker(self, active: ActiveRequest) -> None:
        """A request waits for the stages of speech: meanwhile it keeps no text from the thinker."""
        if active.record.think.speech is not None and self.registry.state("thinker") == "ready":
            self._admission.leave_thinker(active.record.request_id)

    def _remove(self, active: ActiveRequest, served_s: float | None, error: OmniRelayError | None) -> None:
        active.meter.ended(error)
        if active.trace is not None:
            active.trace.ended(error, active.record, active.meter)
        self._history.add(report_of(active.record, active.resumes, error.code if error else None))
        active.timer.cancel()
        active.hold.release()
        del self._active[active.record.request_id]
        self._admission.leave(active.record.request_id, served_s)
        # Deferred: when a stage is lost, all its requests end before others are dispatched.
        asyncio.get_running_loop().call_soon(self.start_waiting)

    def _expire(self, request_id: str, deadline_s: float) -> None:
        if (active := self._active.get(request_id)) is not None:
            error = late_error(active.record.lifecycle.state, deadline_s)
            self._end(active, RequestState.EXPIRED, error)

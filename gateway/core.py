"""The gateway's core: takes requests, follows them through the stages, ends every one of them."""

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from gateway import failures
from gateway.aborts import AbortLedger
from gateway.admission import Admission
from gateway.detokenizer import Detokenizer
from gateway.events import AudioEvent, DoneEvent, TextEvent
from gateway.lifecycle import Lifecycle, RequestState, StateCounts
from gateway.prompt import PromptBuilder
from gateway.protocol import GenerateRequest
from gateway.record import Delta, RequestRecord
from gateway.registry import StageRegistry
from gateway.stream import ClientAccount, ResponseStream
from gateway.validation import SEED_BITS, Validator
from shared.config import GatewayConfig
from shared.errors import (
    CancelledRequestError,
    DeadlineError,
    OmniRelayError,
    QueueFullError,
    SequenceError,
    SlowClientError,
    StageFailedError,
    StageUnavailableError,
)
from shared.messages import (
    SAMPLE_RATE,
    AudioChunk,
    ControlToGateway,
    Heartbeat,
    RequestFailed,
    StageEvent,
    StageName,
    TextDelta,
    ThinkRequest,
)

log = logging.getLogger(__name__)


class StagePort(Protocol):
    """The way to the stages, see :class:`gateway.link.StageLink`."""

    def think(self, request: ThinkRequest) -> None:
        """Ask the thinker."""
        ...

    def abort(self, stage: StageName, request_id: str) -> None:
        """Tell a stage to drop a request."""
        ...


class _Active:
    """A request that has not ended: what is known of it, and the way to its client."""

    def __init__(
        self,
        record: RequestRecord,
        stream: ResponseStream,
        detokenizer: Detokenizer,
        timer: asyncio.TimerHandle,
    ) -> None:
        self.record: Final = record
        self.stream: Final = stream
        self.detokenizer: Final = detokenizer
        self.timer: Final = timer


class Gateway:
    """Owns every request from the first byte to the last.

    Everything but the making of prompts runs on the event loop's thread, so nothing here is locked.

    Args:
        config: The gateway's.
        prompts: Makes prompts and text for the checkpoint.
        stages: The way to the stages.
    """

    def __init__(self, config: GatewayConfig, prompts: PromptBuilder, stages: StagePort) -> None:
        self.registry: Final = StageRegistry(config.heartbeat_timeout_s, config.step_timeout_s)
        self.counts: Final = StateCounts()
        self.dropped_events = 0
        self._prompts = prompts
        self._stages = stages
        self._validator = Validator(config.limits, self.registry, prompts)
        self._admission = Admission(config.limits.max_active, config.limits.max_queued)
        self._aborts = AbortLedger(stages.abort)
        self._active: dict[str, _Active] = {}
        # One thread: tokenizing a long prompt must not hold up the streams, and prompts wait in line.
        self._prompt_thread = ThreadPoolExecutor(1, "prompts")
        self._closing = False

    async def submit(self, request: GenerateRequest, account: ClientAccount) -> ResponseStream:
        """Take a request.

        Args:
            request: What the client asks.
            account: Who asks; its limits apply.

        Returns:
            The events of the request; the caller must close it.

        Raises:
            RequestError: It is refused; one of its children says why.
        """
        lifecycle = Lifecycle(self.counts)
        account_open = False
        try:
            account.open()
            account_open = True
            return await self._admit(request, account, lifecycle)
        except BaseException as error:
            if account_open:
                account.open_requests -= 1
            gone = isinstance(error, asyncio.CancelledError | CancelledRequestError)
            lifecycle.move(RequestState.CANCELLED if gone else RequestState.FAILED)
            log.info("refused a request of %s: %s", account.name, error or "it was cancelled")
            raise

    def cancel(self, request_id: str, reason: str = "the client cancelled the request") -> None:
        """Cancel a request; nothing happens if it has ended."""
        active = self._active.get(request_id)
        if active is not None:
            self._give_up(active, RequestState.CANCELLED, CancelledRequestError(reason))

    def on_event(self, event: StageEvent) -> None:
        """Take what a stage tells about a request."""
        active = self._active.get(event.request_id)
        if active is None or not active.record.lifecycle.at_stages:
            # Normal after an abort: the stage had already sent it.
            self.dropped_events += 1
            log.debug("dropped an event of request %s, which is not at the stages", event.request_id)
        elif isinstance(event, RequestFailed):
            self._give_up(active, RequestState.FAILED, failures.from_stage(event))
        else:
            self._take(active, event)

    def on_control(self, message: ControlToGateway) -> None:
        """Take a heartbeat, or the confirmation of an abort."""
        if not isinstance(message, Heartbeat):
            self._aborts.confirmed(message.stage, message.request_id)
        else:
            restarted = self.registry.note(message)
            self._aborts.resend(message.stage, at_once=restarted)
            if restarted:
                self._lose(message.stage, "was restarted")

    def check_stages(self) -> None:
        """End the requests of stages that have fallen silent; to be called every now and then."""
        for stage in self.registry.newly_down():
            self._lose(stage, "does not answer any more")

    def close(self) -> None:
        """End all requests and take no more."""
        self._closing = True
        for active in list(self._active.values()):
            self._give_up(
                active, RequestState.CANCELLED, CancelledRequestError("the gateway is shutting down")
            )
        self._prompt_thread.shutdown(wait=False, cancel_futures=True)

    async def _admit(
        self, request: GenerateRequest, account: ClientAccount, lifecycle: Lifecycle
    ) -> ResponseStream:
        self._validator.check_stages(request)
        self._validator.speaker(request)
        deadline_s = self._validator.deadline_s(request)
        loop = asyncio.get_running_loop()
        due = loop.time() + deadline_s
        prompt = await loop.run_in_executor(self._prompt_thread, self._validator.prompt, request)
        if self._closing:
            raise CancelledRequestError("the gateway is shutting down")
        self._validator.check_stages(request)
        request_id = secrets.token_hex(8)
        think = self._validator.think_request(request_id, request, prompt, secrets.randbits(SEED_BITS))
        self._admission.enter(request_id, think.priority)
        lifecycle.move(RequestState.QUEUED)
        active = _Active(
            RequestRecord(think, lifecycle),
            ResponseStream(request_id, account, self.cancel),
            self._prompts.detokenizer(),
            loop.call_at(due, self._expire, request_id, deadline_s),
        )
        self._active[request_id] = active
        self._start_waiting()
        return active.stream

    def _start_waiting(self) -> None:
        """Give free places at the stages to those who wait."""
        while not self._closing and (request_id := self._admission.take()) is not None:
            active = self._active[request_id]
            active.record.lifecycle.move(RequestState.THINKING)
            try:
                self._stages.think(active.record.think)
            except QueueFullError as error:
                unavailable = StageUnavailableError(f"the thinker takes no requests: {error}")
                self._give_up(active, RequestState.FAILED, unavailable)

    def _take(self, active: _Active, delta: Delta) -> None:
        record = active.record
        try:
            record.apply(delta)
            self._forward(active, delta)
            record.advance()
        except SequenceError as error:
            self._give_up(active, RequestState.FAILED, StageFailedError(str(error)))
        except SlowClientError as error:
            self._give_up(active, RequestState.FAILED, error)
        else:
            if record.lifecycle.state is RequestState.COMPLETED:
                self._complete(active)

    def _forward(self, active: _Active, delta: Delta) -> None:
        if isinstance(delta, TextDelta):
            text = active.detokenizer.push(delta.token_ids, last=delta.finish_reason is not None)
            if delta.token_ids or text:
                active.stream.push(TextEvent(token_ids=delta.token_ids, text=text))
        elif isinstance(delta, AudioChunk):
            active.stream.push(AudioEvent(seq=delta.seq, pcm=bytes(delta.data.view)))

    def _complete(self, active: _Active) -> None:
        record = active.record
        speech = record.think.speech
        seconds = record.lifecycle.offsets()
        done = DoneEvent(
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
            state_seconds=seconds,
        )
        log.info("request %s completed after %.3f s", record.request_id, seconds["completed"])
        served_s = seconds["completed"] - seconds["thinking"]
        self._remove(active, served_s)
        active.stream.finish(done)

    def _give_up(self, active: _Active, state: RequestState, error: OmniRelayError) -> None:
        """End a request without an answer: tell the stages and the client."""
        record = active.record
        was_at_stages = record.lifecycle.at_stages
        log.info("request %s %s from %s: %s", record.request_id, state, record.lifecycle.state, error)
        record.lifecycle.move(state)
        self._remove(active, None)
        if was_at_stages:
            self._aborts.abort(record.request_id)
        active.stream.finish(failures.to_event(error), drop_waiting=isinstance(error, SlowClientError))

    def _remove(self, active: _Active, served_s: float | None) -> None:
        active.timer.cancel()
        del self._active[active.record.request_id]
        self._admission.leave(active.record.request_id, served_s)
        # Not at once: when a stage is lost, all of its requests end before others take their places.
        asyncio.get_running_loop().call_soon(self._start_waiting)

    def _expire(self, request_id: str, deadline_s: float) -> None:
        active = self._active.get(request_id)
        if active is not None:
            state = active.record.lifecycle.state
            error = DeadlineError(f"the request was still {state} after {deadline_s:g} s")
            self._give_up(active, RequestState.EXPIRED, error)

    def _lose(self, stage: StageName, what: str) -> None:
        """A stage is gone, and what it held of the requests with it."""
        log.error("the %s %s", stage, what)
        for active in list(self._active.values()):
            record = active.record
            # With a restarted stage, those that still wait in line have lost nothing.
            gone = record.lifecycle.at_stages or self.registry.state(stage) != "ready"
            if gone and record.needs(stage):
                self._give_up(active, RequestState.FAILED, StageUnavailableError(f"the {stage} {what}"))

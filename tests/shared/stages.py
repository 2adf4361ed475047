"""A stage in a thread of its own, with a service in memory, and the gateway's side of its sockets."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from omnirelay.errors import OmniRelayError
from shared.config import TalkerConfig
from shared.messages import (
    HEARTBEAT_SUFFIX,
    Abort,
    AbortDone,
    CodecTokens,
    ControlToGateway,
    Heartbeat,
    RequestFailed,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    SynthesisStart,
    TextDelta,
    Token2WavInput,
)
from shared.messages.payloads import DEFAULT_WINDOW_BYTES
from shared.stage.gateways import GatewayLink, GatewayQueues
from shared.stage.heartbeat import HeartbeatThread
from shared.stage.loop import StageLoop
from shared.stage.membership import Membership
from shared.stage.service import StageService
from shared.tracing.stage import StageTraces
from shared.transport.control import ControlClient
from shared.transport.queues import PullQueue, PushQueue
from shared.transport.wire import Decoder, encode
from shared.vllm.model_time import ModelTime
from tests.shared.support import (
    ANY_PORT,
    Context,
    endpoint,
    free_address,
    sending,
    take,
    take_frames,
    wait_until,
)

STAGE: StageName = "token2wav"
INSTANCE = "one"


class EchoService(StageService[CodecTokens | SynthesisStart]):
    """Tells the gateway the tokens it was given, one message a step.

    Attributes:
        refusals: By request: what its next message, or its next step, is answered with.
    """

    name: StageName = STAGE
    limits = StageLimits(max_positions=77, speakers=["Chelsie"])
    model_time: ModelTime

    def __init__(self) -> None:
        self.traces = StageTraces(STAGE)
        self.gateway: GatewayQueues
        self.model_time = ModelTime()
        self.work: dict[str, list[CodecTokens]] = {}
        self.aborts: list[str] = []
        self.accept_errors: dict[str, Exception] = {}
        self.step_failures: dict[str, OmniRelayError] = {}
        self.step_error: Exception | None = None
        self.abort_error: Exception | None = None
        self.steps = 0
        self.alone: str | None = None

    @property
    def ready(self) -> bool:
        return any(work and not self.gateway.stalls(request_id) for request_id, work in self.work.items())

    def accept(self, message: CodecTokens | SynthesisStart) -> None:
        if isinstance(message, SynthesisStart):
            self.traces.begin(message.request_id, message.traceparent, "wait_codes")
            return
        if error := self.accept_errors.pop(message.request_id, None):
            raise error
        self.work.setdefault(message.request_id, []).append(message)

    def abort(self, request_id: str) -> None:
        if self.abort_error is not None:
            raise self.abort_error
        self.aborts.append(request_id)
        self.work.pop(request_id, None)

    def take_turn(self) -> str | None:
        return self.alone

    def step(self) -> dict[str, OmniRelayError]:
        if self.step_error is not None:
            raise self.step_error
        self.steps += 1
        for request_id, messages in list(self.work.items()):
            if messages and request_id not in self.step_failures and not self.gateway.stalls(request_id):
                message = messages.pop(0)
                delta = TextDelta(request_id=request_id, seq=message.seq, token_ids=message.token_ids)
                self.gateway.put(delta)
                if message.last:
                    del self.work[request_id]
                    self.traces.completed(request_id, {})
        failures, self.step_failures = self.step_failures, {}
        return failures

    def load(self) -> StageLoad:
        return StageLoad(running=len(self.work), held_bytes=123, steps=self.steps)

    def active_requests(self) -> list[str]:
        return list(self.work)


class CountingLoop(StageLoop[Any]):
    """Counts how often it came round."""

    rounds = 0

    def _wait(self) -> None:
        self.rounds += 1
        super()._wait()


class Harness:
    """The loop, and what the other processes would hold of its sockets."""

    def __init__(
        self,
        context: Context,
        max_backlog_bytes: int = 2**20,
        heartbeat_s: float = 0.05,
        orphan_timeout_s: float = 5.0,
        drain_s: float = 10.0,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        service: EchoService | None = None,
    ) -> None:
        self.service = service or EchoService()
        self.context = context
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(ANY_PORT)
        self.decoder: Decoder[ControlToGateway] = Decoder(ControlToGateway)
        self._done: list[AbortDone] = []
        self._heard: list[Heartbeat] = []
        self._events_address = free_address()
        self.config = TalkerConfig(heartbeat_s=heartbeat_s, drain_s=drain_s)
        self.inbox = PullQueue[Any](context, ANY_PORT, Token2WavInput)
        control_address = endpoint(self.router)
        self._control = ControlClient(context, control_address, STAGE)
        self.gateway = PushQueue[StageEvent](
            context,
            self._events_address,
            sending(max_backlog_bytes=max_backlog_bytes, window_bytes=window_bytes),
        )
        self.heart = HeartbeatThread(context, control_address, STAGE, heartbeat_s)
        link = GatewayLink(self._control, self.heart, self.gateway, orphan_timeout_s)
        self.service.gateway = GatewayQueues(self.gateway.sending, [link])
        self.membership = Membership(STAGE, INSTANCE, self.inbox.endpoint, self.service.gateway)
        # Nobody listens there, so that what is put waits.
        self.absent = PushQueue[Any](context, free_address(), sending(max_backlog_bytes=1000))
        self.loop = CountingLoop(
            self.service,
            self.config,
            self.inbox,
            self.membership,
            self.service.gateway,
            [self.service.gateway, self.absent],
        )
        self.sender = PushQueue[Any](context, endpoint(self.inbox.socket), sending())
        self.raw = context.socket(zmq.PUSH)
        self.raw.connect(endpoint(self.inbox.socket))
        self.events: PullQueue[Any] | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name="stage", daemon=True)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def start(self) -> None:
        # The stage speaks first, as a heartbeat does: a ROUTER knows whom it has heard of.
        hello = AbortDone(request_id="hello", stage=STAGE, instance=INSTANCE)
        wait_until(lambda: self._control.send(hello))
        assert take_frames(self.router)[0] == STAGE.encode()
        self.heart.start()
        self.thread.start()

    def listen(self) -> None:
        """Start to take the stage's events."""
        self.events = PullQueue[Any](self.context, self._events_address, StageEvent)

    def stop(self) -> None:
        self.loop.stop()
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()
        self.heart.stop()

    def send(self, request_id: str, seq: int = 0, last: bool = False, tokens: int = 1) -> None:
        message = CodecTokens(request_id=request_id, seq=seq, token_ids=[seq] * tokens, last=last)
        self.sender.put(message)
        wait_until(lambda: self.sender.backlog_bytes == 0, meanwhile=self.sender.flush)

    def take(self, count: int) -> list[Any]:
        """Wait for exactly this many events."""
        assert self.events is not None
        return take(self.events, count)

    def take_failure(self) -> RequestFailed:
        (failure,) = self.take(1)
        assert isinstance(failure, RequestFailed)
        return failure

    def abort(self, request_id: str) -> AbortDone:
        """Abort a request and wait for the answer."""
        self.router.send_multipart([STAGE.encode(), *encode(Abort(request_id=request_id))])
        wait_until(lambda: bool(self._done), self._hear)
        return self._done.pop()

    def next_heartbeat(self) -> Heartbeat:
        self._heard.clear()
        wait_until(lambda: bool(self._heard), self._hear)
        return self._heard[-1]

    def _hear(self) -> None:
        identity, *frames = take_frames(self.router)
        message = self.decoder.decode(frames)
        if isinstance(message, Heartbeat):
            assert identity == (STAGE + HEARTBEAT_SUFFIX).encode()
            self._heard.append(message)
        elif isinstance(message, AbortDone):
            assert identity == STAGE.encode()
            self._done.append(message)


@contextmanager
def running(context: Context, listening: bool = True, **options: Any) -> Iterator[Harness]:
    """A running stage."""
    harness = Harness(context, **options)
    if listening:
        harness.listen()
    harness.start()
    try:
        yield harness
    finally:
        harness.stop()

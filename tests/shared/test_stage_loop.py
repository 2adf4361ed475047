"""The stage loop with real sockets and a service that computes nothing."""

import math
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from prometheus_client.core import Metric

from omnirelay.errors import OmniRelayError, SequenceError, UnknownSpeakerError
from shared.config import ThinkerConfig
from shared.messages import (
    Abort,
    CodecTokens,
    RequestFailed,
    StageEvent,
    StageLimits,
    StageLoad,
    StageName,
    SynthesisStart,
    Token2WavInput,
)
from shared.stage.gateways import GatewayLink, GatewayQueues
from shared.stage.heartbeat import HeartbeatThread
from shared.stage.loop import StageLoop
from shared.stage.membership import Membership
from shared.tracing.stage import StageTraces
from shared.transport.control import ControlClient
from shared.transport.queues import PullQueue, PushQueue
from shared.transport.wire import encode
from shared.vllm.model_time import ModelTime
from tests.shared.support import ANY_PORT, Context, endpoint, free_address, sending, wait_until


class Service:
    """Does with each message what the test says."""

    name: StageName = "token2wav"
    limits = StageLimits()
    wake_fd: int | None = None
    wake_at = math.inf

    def __init__(self) -> None:
        self.model_time = ModelTime()
        self.traces = StageTraces(self.name)
        self.ready = False
        self.steps = 0
        self.accepted: list[tuple[str, int]] = []
        self.on_accept: Callable[[CodecTokens], None] = lambda _: None

    def accept(self, message: Token2WavInput) -> None:
        if isinstance(message, CodecTokens):
            self.accepted.append((message.request_id, message.seq))
            self.on_accept(message)

    def abort(self, request_id: str) -> None:
        pass

    def take_turn(self) -> str | None:
        return None

    def step(self) -> dict[str, OmniRelayError]:
        self.steps += 1
        self.ready = False
        return {}

    def load(self) -> StageLoad:
        return StageLoad()

    def holds(self, request_id: str) -> bool:
        return request_id != "unknown"

    def active_requests(self) -> list[str]:
        return []

    def close(self) -> None:
        pass

    def collect(self) -> Iterator[Metric]:
        return iter(())


class Bench:
    """A loop, the sockets around it, and a thread that runs it from :meth:`start` on."""

    def __init__(self, context: Context, heartbeat_s: float = 0.5, service: Service | None = None) -> None:
        self.service = service or Service()
        self.events: PullQueue[StageEvent] = PullQueue(context, ANY_PORT, StageEvent)
        self.gateway: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.gateway.bind(ANY_PORT)
        self.gateway.set(zmq.ROUTER_MANDATORY, 1)
        self.inbox: PullQueue[Token2WavInput] = PullQueue(context, ANY_PORT, Token2WavInput)
        to_gateway: PushQueue[StageEvent] = PushQueue(context, endpoint(self.events.socket), sending())
        # Nobody listens there, so that what is put waits.
        self.absent: PushQueue[SynthesisStart | CodecTokens] = PushQueue(
            context, free_address(), sending(max_backlog_bytes=1000)
        )
        self._push = context.socket(zmq.PUSH)
        self._push.connect(endpoint(self.inbox.socket))
        control = endpoint(self.gateway)
        config = ThinkerConfig(heartbeat_s=heartbeat_s)
        link = GatewayLink(
            ControlClient(context, control, "token2wav"),
            HeartbeatThread(context, control, "token2wav", config.heartbeat_s),
            to_gateway,
        )
        queues = GatewayQueues(to_gateway.sending, [link])
        self._loop: StageLoop[Token2WavInput] = StageLoop(
            self.service,
            config,
            self.inbox,
            Membership("token2wav", "one", self.inbox.endpoint, queues),
            queues,
            [queues, self.absent],
        )
        self._thread = threading.Thread(target=self._loop.run)

    def start(self) -> None:
        self._thread.start()

    def send(self, request_id: str, seq: int) -> None:
        self._push.send_multipart(encode(CodecTokens(request_id=request_id, seq=seq, token_ids=[])))

    def abort(self, request_id: str) -> None:
        def reached() -> bool:
            try:
                self.gateway.send_multipart([b"token2wav", *encode(Abort(request_id=request_id))])
            except zmq.ZMQError:
                return False
            return True

        wait_until(reached)

    def failure(self) -> RequestFailed:
        """The next failure that the gateway is told."""
        told: list[StageEvent] = []
        wait_until(lambda: bool(told), meanwhile=lambda: told.extend(self.events.drain(1)))
        assert isinstance(told[0], RequestFailed)
        return told[0]

    def stop(self) -> None:
        self._loop.stop()
        self.send("end", 0)
        self._thread.join(10)


@pytest.fixture
def bench() -> Iterator[Bench]:
    context = Context()
    bench = Bench(context)
    yield bench
    bench.stop()
    context.destroy(linger=0)


def test_an_abort_drops_what_waits_for_a_peer_that_is_away(bench: Bench) -> None:
    """Else one dead request's rows would take the room of others until the peer is back."""
    bench.absent.put(CodecTokens(request_id="other", seq=0, token_ids=[1]))
    other_bytes = bench.absent.backlog_bytes
    bench.absent.put(CodecTokens(request_id="dead", seq=0, token_ids=[1] * 600))
    assert bench.absent.backlog_bytes > other_bytes
    bench.start()
    bench.abort("dead")
    wait_until(lambda: bench.absent.backlog_bytes == other_bytes)


def test_an_error_nobody_expected_ends_one_request_and_not_the_stage(bench: Bench) -> None:
    def refuse(message: CodecTokens) -> None:
        if message.request_id == "odd":
            raise KeyError("no such thing")

    bench.service.on_accept = refuse
    bench.start()
    bench.send("odd", 0)
    failed = bench.failure()
    assert (failed.request_id, failed.code) == ("odd", "stage_failed")
    assert "KeyError" in failed.message
    bench.send("good", 0)
    wait_until(lambda: ("good", 0) in bench.service.accepted)


def test_what_still_comes_for_a_failed_request_is_dropped_in_silence(bench: Bench) -> None:
    """Its sender could not know better; only messages that are wrong in themselves count as refused."""

    def refuse(message: CodecTokens) -> None:
        if message.seq > 0:
            raise SequenceError("not known here")
        if message.request_id == "failing":
            raise UnknownSpeakerError("no such voice")

    bench.service.on_accept = refuse
    bench.start()
    for seq in range(3):
        bench.send("failing", seq)
    bench.send("after", 0)
    assert bench.failure().code == "unknown_speaker"
    wait_until(lambda: ("after", 0) in bench.service.accepted)
    assert bench.service.accepted == [("failing", 0), ("after", 0)]
    assert bench.inbox.refused.total() == 0


def test_a_loop_without_messages_steps_when_the_service_said() -> None:
    """And not only with the next report, half a minute later."""

    class Punctual(Service):
        """Is ready from a time on, once."""

        wake_at = math.inf

        @property
        def ready(self) -> bool:
            return time.monotonic() >= self.wake_at

        @ready.setter
        def ready(self, _: bool) -> None:
            self.wake_at = math.inf

    context = Context()
    bench = Bench(context, heartbeat_s=60.0, service=Punctual())
    try:
        bench.start()
        bench.send("a", 0)
        wait_until(lambda: ("a", 0) in bench.service.accepted)
        asked = time.monotonic() + 0.2
        bench.service.on_accept = lambda _: setattr(bench.service, "wake_at", asked)
        bench.send("a", 1)
        wait_until(lambda: bench.service.steps == 1)
        assert time.monotonic() >= asked
    finally:
        bench.stop()
        context.destroy(linger=0)

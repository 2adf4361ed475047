"""A stage that several gateways share: real sockets, a service in memory."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from shared.config import Config, GatewayAddresses
from shared.messages import (
    Abort,
    AbortDone,
    Closing,
    CodecTokens,
    ControlToGateway,
    ControlToStage,
    Heartbeat,
    Peers,
    RequestFailed,
    StageEvent,
    TextDelta,
    Token2WavInput,
)
from shared.stage.gateways import GatewayLink, GatewayQueues, open_gateway
from shared.stage.heartbeat import HeartbeatThread
from shared.stage.loop import StageLoop
from shared.stage.membership import Membership
from shared.transport.control import ControlClient
from shared.transport.queues import PullQueue, PushQueue
from shared.transport.routing import PeerQueues
from shared.transport.sockets import bind
from shared.transport.wire import Decoder, encode
from tests.shared.stages import INSTANCE, STAGE, EchoService
from tests.shared.support import ANY_PORT, Context, Open, endpoint, free_address, sending, wait_until
from tests.shared.test_control import heartbeat

WINDOW = 1000


class Gateway:
    """What a gateway has towards the stages.

    Attributes:
        events: What came to it; None while it reads nothing.
        beat: The last heartbeat that it heard.
        done: The aborts that were confirmed to it.
    """

    def __init__(self, context: Context, name: str, reads: bool = True) -> None:
        self.name = name
        self.control = context.socket(zmq.ROUTER)
        self.control.bind(ANY_PORT)
        self.address = free_address()
        self.events = PullQueue[Any](context, self.address, StageEvent) if reads else None
        self.told: list[Any] = []
        self.beat: Heartbeat | None = None
        self.done: list[str] = []
        self._decoder: Decoder[ControlToGateway] = Decoder(ControlToGateway)

    def tell(self, message: ControlToStage) -> None:
        self.control.send_multipart([STAGE.encode(), *encode(message)])

    def join(self, **fields: Any) -> None:
        """Answer heartbeats until the stage has joined."""
        self.tell(Peers(gateway=self.name, **fields))
        wait_until(lambda: self.beat is not None and self.beat.gateway == self.name, self.hear)

    def hear(self) -> None:
        """Take all that came."""
        while self.control.poll(1):
            _, *frames = self.control.recv_multipart()
            message = self._decoder.decode(frames)
            if isinstance(message, Heartbeat):
                self.beat = message
            elif isinstance(message, AbortDone):
                self.done.append(message.request_id)
        if self.events is not None:
            self.told += self.events.drain()
            for credit in self.events.take_credits():
                self.tell(credit)


class Following:
    """A stage that serves the gateways of a list.

    Attributes:
        found: Where they are.
        opened: The links that there ever were.
    """

    def __init__(self, context: Context, orphan_timeout_s: float = 60.0) -> None:
        self.found: list[GatewayAddresses] = []
        self.opened: list[GatewayLink] = []
        self._context = context
        self._orphan_timeout_s = orphan_timeout_s
        self.inbox = PullQueue[Any](context, ANY_PORT, Token2WavInput)
        self.service = EchoService()
        self.queues = self.service.gateway = GatewayQueues(sending())
        self.membership = Membership(STAGE, INSTANCE, self.inbox.endpoint, self.queues)
        config = Config().stages.talker
        self.loop: StageLoop[Any] = StageLoop(
            self.service, config, self.inbox, self.membership, self.queues, [self.queues], self.follow
        )
        self._sender = PushQueue[Any](context, self.inbox.endpoint, sending())

    def link(self, gateway: Gateway) -> GatewayLink:
        """The link to a gateway that it has joined."""
        return next(each for each in self.queues.links if each.name == gateway.name)

    def follow(self) -> bool:
        return self.queues.follow(self.found, self._connect)

    def _connect(self, place: GatewayAddresses) -> GatewayLink:
        heart = HeartbeatThread(self._context, place.control, STAGE, 0.05)
        heart.start()
        events = PushQueue[StageEvent](self._context, place.events, sending(window_bytes=WINDOW))
        control = ControlClient(self._context, place.control, STAGE)
        self.opened.append(GatewayLink(control, heart, events, self._orphan_timeout_s))
        return self.opened[-1]

    def list(self, *gateways: Gateway) -> None:
        self.found = [
            GatewayAddresses(events=each.address, control=endpoint(each.control)) for each in gateways
        ]

    def hears(self, gateway: Gateway) -> None:
        """Let a gateway, once the stage has connected, be joined."""

        def greet() -> None:
            # A ROUTER knows whom it has heard of.
            for link in self.queues.links:
                link.control.send(AbortDone(request_id="hello", stage=STAGE, instance=INSTANCE))
            gateway.hear()

        wait_until(lambda: "hello" in gateway.done, greet)
        gateway.join()

    def work(self, request_id: str, seq: int = 0, tokens: int = 1, last: bool = False) -> None:
        """Let a message of another stage come."""
        message = CodecTokens(request_id=request_id, seq=seq, token_ids=[1] * tokens, last=last)
        self._sender.put(message)
        wait_until(lambda: self._sender.backlog_bytes == 0, self._sender.flush)

    def close(self) -> None:
        self.queues.close()
        self.queues.close()
        assert all(link.control.socket.closed and not link.heart.is_alive() for link in self.opened)


@contextmanager
def shared(context: Context, *gateways: Gateway, **options: Any) -> Iterator[Following]:
    """A running stage that all of them have joined."""
    stage = Following(context, **options)
    stage.list(*gateways)
    thread = threading.Thread(target=stage.loop.run, name="stage")
    thread.start()
    try:
        for each in gateways:
            stage.hears(each)
        yield stage
    finally:
        stage.loop.stop()
        thread.join(20)
        assert not thread.is_alive()
        stage.close()


def pair(context: Context) -> tuple[Gateway, Gateway]:
    return Gateway(context, "aaaaaaaa"), Gateway(context, "bbbbbbbb")


@contextmanager
def at_work(context: Context) -> Iterator[tuple[Following, Gateway, Gateway]]:
    """A stage that works on a request of each of two gateways, which have heard of it."""
    one, other = pair(context)
    with shared(context, one, other) as stage:
        for each in (one, other):
            stage.work(f"{each.name}1")
        for each in (one, other):
            wait_until(lambda each=each: bool(each.told), each.hear)  # type: ignore[misc]
        yield stage, one, other


def ids(gateway: Gateway) -> list[str]:
    return [each.request_id for each in gateway.told]


def test_each_gateway_hears_of_its_own_requests_and_is_told_the_load_of_all(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other) as stage:
        for name in ("aaaaaaaa1", "bbbbbbbb1", "aaaaaaaa2"):
            stage.work(name)
        wait_until(lambda: len(one.told) == 2, one.hear)
        wait_until(lambda: len(other.told) == 1, other.hear)
        assert ids(one) == ["aaaaaaaa1", "aaaaaaaa2"]
        assert ids(other) == ["bbbbbbbb1"]
        for each in (one, other):
            wait_until(lambda each=each: each.beat.load.running == 3, each.hear)  # type: ignore[misc]
        # Of a gateway that nobody has joined.
        stage.work("cccccccc1")
        stage.work("bbbbbbbb2")
        wait_until(lambda: len(other.told) == 2, other.hear)
        assert "cccccccc1" not in stage.service.active_requests()


def test_another_gateway_at_the_address_of_one_replaces_that_one_alone(context: Context) -> None:
    with at_work(context) as (stage, one, _):
        # Who is heard again is the same one.
        one.join()
        assert len(stage.service.active_requests()) == 2
        one.name = "cccccccc"
        one.join()
        wait_until(lambda: stage.service.active_requests() == ["bbbbbbbb1"])
        # What comes late of its predecessor is nobody's.
        stage.work("aaaaaaaa1", 1)
        stage.work("cccccccc1")
        wait_until(lambda: "cccccccc1" in ids(one), one.hear)
        assert set(stage.service.active_requests()) == {"bbbbbbbb1", "cccccccc1"}
        assert stage.inbox.refused.total() == 0


def test_a_gateway_that_is_silent_loses_its_requests_and_is_told_so(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other, orphan_timeout_s=3.0) as stage:
        stage.work("aaaaaaaa1")
        stage.work("bbbbbbbb1")

        def speak() -> None:
            other.tell(Peers(gateway=other.name))
            other.hear()
            one.hear()

        wait_until(lambda: any(isinstance(each, RequestFailed) for each in one.told), speak)
        wait_until(lambda: [each.name for each in stage.membership.joined] == ["bbbbbbbb"], speak)
        assert stage.service.active_requests() == ["bbbbbbbb1"]
        assert not any(isinstance(each, RequestFailed) for each in other.told)
        failures = [each for each in one.told if isinstance(each, RequestFailed)]
        assert [(each.request_id, each.code) for each in failures] == [("aaaaaaaa1", "stage_unavailable")]
        # It comes back.
        one.join()


def test_no_gateway_ends_requests_of_another(context: Context) -> None:
    with at_work(context) as (stage, one, other):
        one.tell(Abort(request_id="bbbbbbbb1"))
        wait_until(lambda: bool(one.beat and one.beat.load.refused), one.hear)
        assert stage.service.active_requests() == ["aaaaaaaa1", "bbbbbbbb1"]
        other.tell(Abort(request_id="bbbbbbbb1"))
        wait_until(lambda: "bbbbbbbb1" in other.done, other.hear)
        assert stage.service.active_requests() == ["aaaaaaaa1"]
        assert "bbbbbbbb1" not in one.done


def test_a_gateway_that_takes_nothing_holds_its_own_requests_alone(context: Context) -> None:
    one, other = Gateway(context, "aaaaaaaa", reads=False), Gateway(context, "bbbbbbbb")
    with shared(context, one, other) as stage:
        for seq in range(5):
            stage.work("aaaaaaaa1", seq, tokens=WINDOW)
        wait_until(lambda: stage.link(one).events.backlog_bytes > 0)
        for seq in range(20):
            stage.work("bbbbbbbb1", seq)
        wait_until(lambda: len(other.told) == 20, other.hear)
        assert len(stage.service.work["aaaaaaaa1"]) >= 3
        one.events = PullQueue[Any](context, one.address, StageEvent)
        wait_until(lambda: len(one.told) == 5, one.hear)


def test_a_stage_drains_until_no_gateway_needs_it(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other) as stage:
        stage.loop.drain()
        one.tell(Peers(gateway=one.name, released=True))
        wait_until(lambda: stage.link(one).released)
        assert not stage.membership.may_end()
        other.tell(Closing())
        wait_until(stage.membership.may_end)


def test_replicas_that_any_gateway_knows_are_reached(context: Context) -> None:
    """One that has just started knows none yet; its word alone would cut off all."""
    queues = PeerQueues[Any](context, "token2wav", sending())
    known = {name: free_address() for name in ("x", "y", "z")}
    stage = Following(context)
    stage.list(*pair(context))
    stage.follow()
    links = stage.queues.links
    member = Membership("talker", INSTANCE, stage.inbox.endpoint, stage.service.gateway, queues)
    assert member.hear(links[0], Peers(gateway="aaaaaaaa", replicas={"x": known["x"], "y": known["y"]}))
    assert member.hear(links[1], Peers(gateway="bbbbbbbb"))
    assert set(queues._queues) == {"x", "y"}
    member.hear(links[1], Peers(gateway="bbbbbbbb", replicas={"y": free_address(), "z": known["z"]}))
    assert {name: queue.address for name, queue in queues._queues.items()} == known
    # A gateway that does not name them knows no others than those.
    member.leave(links[0])
    member.hear(links[1], Peers(gateway="bbbbbbbb"))
    assert set(queues._queues) == {"x", "y", "z"}
    member.hear(links[1], Peers(gateway="bbbbbbbb", replicas={"z": known["z"]}))
    assert set(queues._queues) == {"z"}
    stage.close()


def test_a_gateway_without_the_key_gets_nothing(opened: Open) -> None:
    """It listens at an address that the configuration names; the stage serves the other one."""
    stage, real = opened("talker"), opened("gateway")
    control = real.socket(zmq.ROUTER)
    bind(control, ANY_PORT)
    with zmq.Context() as outside, outside.socket(zmq.ROUTER) as stranger, outside.socket(zmq.PULL) as sink:
        stranger.bind(ANY_PORT)
        sink.bind(ANY_PORT)
        config = Config.model_validate(
            {
                "gateway": {
                    "control": endpoint(control),
                    "events": free_address(),
                    "others": [{"control": endpoint(stranger), "events": endpoint(sink)}],
                },
                "stages": {"talker": {"heartbeat_s": 0.05}},
            }
        )
        links = [open_gateway(stage, each, config, "talker", INSTANCE) for each in config.gateway.addresses]
        try:
            for link in links:
                link.report(heartbeat(), at_once=True)
            for _ in range(5):
                assert control.poll(60_000)
                control.recv_multipart()
            # It may believe that it has been joined, but nothing goes there.
            links[1].hear(Peers(gateway="bbbbbbbb"))
            until = time.monotonic() + 0.5
            GatewayQueues(sending(), links).put(
                RequestFailed(request_id="bbbbbbbb1", stage="talker", code="stage_failed", message="")
            )
            while time.monotonic() < until:
                assert not stranger.poll(50)
                assert not sink.poll(50)
            assert links[1].heart.sent == 0
        finally:
            for link in links:
                link.close()


# --- a request that may end the engine is computed alone, and its gateway knows before that ---


def confirm(gateway: Gateway, request_id: str | None) -> None:
    """Hear that a request is computed alone, and confirm it."""
    wait_until(lambda: gateway.beat is not None and gateway.beat.alone == request_id, gateway.hear)
    gateway.tell(Peers(gateway=gateway.name, alone=request_id))


def test_a_stage_computes_nothing_before_the_gateway_knows_what_is_computed_alone(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other) as stage:
        first, second = f"{one.name}1", f"{other.name}1"
        stage.service.alone = first
        stage.work(first)
        wait_until(lambda: one.beat is not None and one.beat.alone == first, one.hear)
        other.tell(Peers(gateway=other.name, alone=first))
        other.hear()
        assert other.beat is not None
        assert other.beat.alone is None
        assert stage.service.steps == 0
        other.tell(Peers(gateway=other.name))
        confirm(one, first)
        wait_until(lambda: bool(one.told), one.hear)
        assert isinstance(one.told[0], TextDelta)
        stage.service.alone = second
        stage.work(second)
        for gateway, alone in ((one, None), (other, second)):
            assert not other.told
            confirm(gateway, alone)
        wait_until(lambda: bool(other.told), other.hear)


def test_a_gateway_that_is_gone_does_not_keep_a_stage_waiting(context: Context) -> None:
    one, other = pair(context)
    with shared(context, one, other) as stage:
        stage.service.alone = f"{one.name}1"
        stage.work(f"{one.name}1")
        wait_until(lambda: one.beat is not None and one.beat.alone is not None, one.hear)
        one.tell(Closing())
        wait_until(lambda: not stage.service.work)
        stage.service.alone = None
        stage.work(f"{other.name}1")
        wait_until(lambda: bool(other.told), other.hear)

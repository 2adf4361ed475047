"""The control channel, and a replica and its gateway: joining, orphans, draining."""

import logging
import os
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from shared.config import Config
from shared.messages import (
    HEARTBEAT_SUFFIX,
    Abort,
    AbortDone,
    Closing,
    ControlToGateway,
    ControlToStage,
    Heartbeat,
    Peers,
    Route,
    StageLimits,
    StageLoad,
    TextDelta,
)
from shared.stage.gateways import GatewayLink
from shared.stage.heartbeat import HeartbeatThread
from shared.transport.control import MAX_CONTROL_BYTES, ControlClient
from shared.transport.wire import VERSION_BYTE, Decoder, encode
from tests.shared.stages import INSTANCE, STAGE, Harness, running
from tests.shared.support import ANY_PORT, Context, endpoint, free_address, take_frames, wait_until
from tests.shared.test_peers import start

DECODER: Decoder[ControlToGateway] = Decoder(ControlToGateway)


@pytest.fixture
def router(context: Context) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    router.bind(ANY_PORT)
    return router


@pytest.fixture
def client(context: Context, router: zmq.Socket[bytes]) -> ControlClient:
    """A client that the router knows, as a stage's first message makes it."""
    client = ControlClient(context, endpoint(router), "talker")
    wait_until(lambda: client.send(heartbeat(steps=7)))
    identity, *frames = take_frames(router)
    assert (identity, DECODER.decode(frames)) == (b"talker", heartbeat(steps=7))
    return client


def heartbeat(steps: int = 1) -> Heartbeat:
    return Heartbeat(
        stage="talker",
        pid=os.getpid(),
        instance="one",
        inbox="tcp://127.0.0.1:5563",
        limits=StageLimits(max_positions=100, speakers=["Chelsie"]),
        load=StageLoad(running=2, steps=steps),
        peak_memory_bytes=12345,
    )


def heard(router: zmq.Socket[bytes]) -> Heartbeat:
    """The next heartbeat."""
    message = DECODER.decode(take_frames(router)[1:])
    assert isinstance(message, Heartbeat)
    return message


@pytest.fixture
def heart(context: Context, router: zmq.Socket[bytes]) -> Iterator[HeartbeatThread]:
    """A thread in a hurry, which has nothing to report yet."""
    heart = HeartbeatThread(context, endpoint(router), "talker", interval_s=0.001)
    heart.start()
    yield heart
    heart.stop()


def receive(client: ControlClient, count: int) -> list[ControlToStage]:
    messages: list[ControlToStage] = []
    wait_until(lambda: len(messages) >= count, lambda: messages.extend(client.receive()))
    assert len(messages) == count
    return messages


def test_aborts_reach_the_stage_they_are_for_and_are_answered(context, router, client):
    other = ControlClient(context, endpoint(router), "thinker")
    wait_until(lambda: other.send(heartbeat()))
    assert take_frames(router)[0] == b"thinker"
    for request_id in ("a", "b"):
        router.send_multipart([b"talker", *encode(Abort(request_id=request_id))])
    router.send_multipart([b"thinker", *encode(Abort(request_id="c"))])
    assert receive(client, 2) == [Abort(request_id="a"), Abort(request_id="b")]
    assert receive(other, 1) == [Abort(request_id="c")]
    done = AbortDone(request_id="a", stage="talker", instance="one")
    assert client.send(done)
    identity, *frames = take_frames(router)
    assert (identity, DECODER.decode(frames)) == (b"talker", done)


def test_malformed_aborts_are_refused_and_later_ones_taken(router, client, caplog):
    with caplog.at_level(logging.WARNING, logger="shared.transport.control"):
        for frames in (
            [b""],
            [b"\x09spam"],
            [VERSION_BYTE + b"spam"],
            [*encode(Abort(request_id="a")), b"extra"],
            encode(TextDelta(request_id="a", seq=0, token_ids=[])),
            encode(Abort(request_id="not an id")),
        ):
            router.send_multipart([b"talker", *frames])
        router.send_multipart([b"talker", *encode(Abort(request_id="a"))])
        assert receive(client, 1) == [Abort(request_id="a")]
    assert client.refused.total() == len(caplog.records) == 6
    assert "refused a control message: version_unsupported" in caplog.text


def test_a_message_larger_than_allowed_ends_the_connection_and_is_not_taken(router, client):
    router.send_multipart([b"talker", bytes(MAX_CONTROL_BYTES + 1)])
    router.send_multipart([b"talker", *encode(Abort(request_id="a"))])
    wait_until(lambda: not client.send(heartbeat()))
    assert client.receive() == []
    assert not client.refused


def test_nothing_is_kept_for_a_gateway_that_is_not_there(context):
    """A gateway that starts should hear how the stage is, not how it was."""
    address = free_address()
    client = ControlClient(context, address, "talker")
    assert [client.send(heartbeat(steps)) for steps in range(5)] == [False] * 5
    router = context.socket(zmq.ROUTER)
    router.bind(address)
    wait_until(lambda: client.send(heartbeat(steps=99)))
    assert DECODER.decode(take_frames(router)[1:]) == heartbeat(steps=99)


def test_the_heartbeat_thread_repeats_the_last_report_with_the_time_since(context, router):
    heart = HeartbeatThread(context, endpoint(router), "talker", interval_s=0.01)
    started = time.monotonic()
    heart.note(heartbeat(steps=1))
    heart.start()
    busy = []
    for _ in range(5):
        identity, *frames = take_frames(router)
        message = DECODER.decode(frames)
        assert identity == b"talker" + HEARTBEAT_SUFFIX.encode()
        assert isinstance(message, Heartbeat)
        assert (message.load.steps, message.peak_memory_bytes) == (1, 12345)
        busy.append(message.busy_s)
    assert busy == sorted(set(busy))
    assert 0.04 < busy[-1] <= time.monotonic() - started
    started = time.monotonic()
    heart.note(heartbeat(steps=2))
    seen: list[Heartbeat] = []
    wait_until(lambda: bool(seen) and seen[-1].load.steps == 2, lambda: seen.append(heard(router)))
    assert seen[-1].busy_s <= time.monotonic() - started
    heart.stop()


def test_the_heartbeat_thread_stops_at_once_and_closes_its_socket(context, router):
    heart = HeartbeatThread(context, endpoint(router), "talker", interval_s=3600)
    heart.start()
    wait_until(lambda: len(context.made) == 2)
    heart.stop()
    assert not heart.is_alive()
    assert [made.closed for made in context.made] == [False, True]
    heart.stop()
    # One that never started can be stopped, too.
    HeartbeatThread(context, free_address(), "talker", interval_s=1).stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]


def test_the_heartbeat_thread_is_silent_before_the_first_report(heart, router):
    assert not router.poll(50)
    heart.note(heartbeat(steps=3))
    assert heard(router).load.steps == 3


def test_heartbeats_are_without_peers_until_these_change_or_the_gateway_misses_some(heart, router):
    first = msgspec.structs.replace(heartbeat(steps=1), peers=["a"])
    heart.note(first)
    assert heard(router).peers == ["a"]
    assert [heard(router).peers for _ in range(3)] == [None] * 3
    heart.note(msgspec.structs.replace(first, peers=["a", "b"]))
    wait_until(lambda: heard(router).peers == ["a", "b"])
    assert heard(router).peers is None
    heart.answered(Peers(gateway="g"))
    assert [heard(router).peers for _ in range(3)] == [None] * 3
    heart.answered(Peers(gateway="g", replicas={"a": "ipc://a"}))
    wait_until(lambda: heard(router).peers == ["a", "b"])
    assert heard(router).peers is None


def test_the_gateway_can_ask_for_fewer_heartbeats_but_not_for_more(heart, router):
    heart.note(heartbeat(steps=1))
    take_frames(router)
    heart.answered(Peers(gateway="g", heartbeat_s=30.0))
    # What was under way at the time still comes.
    while router.poll(100):
        take_frames(router)
    heart.note(heartbeat(steps=2), at_once=True)
    wait_until(lambda: heard(router).load.steps == 2)
    assert not router.poll(50)
    heart.answered(Peers(gateway="g"))
    heart.note(heartbeat(steps=3), at_once=True)
    for _ in range(5):
        take_frames(router)


def tell(harness: Harness, message: Peers | Closing) -> None:
    """Speak for the gateway."""
    harness.router.send_multipart([STAGE.encode(), *encode(message)])


def joined(harness: Harness, gateway: str | None) -> None:
    wait_until(lambda: harness.next_heartbeat().gateway == gateway)


def in_work(harness: Harness, *names: str) -> None:
    for name in names:
        harness.service.work.setdefault(name, [])
        harness.send(name, 0)
    harness.take(len(names))
    assert set(names) <= set(harness.service.work)


def test_what_was_for_another_process_at_the_address_is_dropped(context: Context) -> None:
    with running(context) as harness:
        tell(harness, Peers(gateway="aaaa"))
        joined(harness, "aaaa")
        harness.sender.put(start("aaaa1", "before"))
        harness.send("aaaa1", 0)
        harness.sender.put(start("aaaa2", INSTANCE))
        harness.send("aaaa2", 0)
        (event,) = harness.take(1)
        assert event.request_id == "aaaa2"
        assert harness.inbox.refused.total() == 0


@pytest.mark.parametrize("released", [True, False])
def test_a_stage_that_drains_goes_on_until_nothing_needs_it_or_its_time_is_over(
    context: Context, released: bool
) -> None:
    harness = Harness(context, drain_s=60.0 if released else 3.0)
    harness.listen()
    harness.start()
    tell(harness, Peers(gateway="aaaa"))
    joined(harness, "aaaa")
    in_work(harness, "aaaa1")
    harness.loop.drain()
    wait_until(lambda: harness.next_heartbeat().draining)
    in_work(harness, "aaaa2")
    assert harness.thread.is_alive()
    if released:
        tell(harness, Peers(gateway="aaaa", released=True))
    harness.thread.join(timeout=60)
    assert not harness.thread.is_alive()
    assert harness.error is None
    harness.stop()


def test_a_stage_without_a_gateway_stops_at_once(context: Context) -> None:
    """Also if a sender that has not yet heard of the gateway's end has sent it more."""
    harness = Harness(context, drain_s=60.0)
    harness.listen()
    harness.start()
    in_work(harness, "aaaa1")
    harness.loop.drain()
    harness.thread.join(timeout=60)
    assert not harness.thread.is_alive()
    harness.stop()


@pytest.mark.parametrize(
    ("own_s", "asked_s", "most_s"), [(0.05, 0.0, 5.0), (0.05, 4.0, 12.0), (4.0, 0.0, 12.0)]
)
def test_a_gateway_that_answers_few_heartbeats_may_be_silent_for_longer(
    context: Context, own_s: float, asked_s: float, most_s: float
) -> None:
    now = 0.0
    harness = Harness(context, heartbeat_s=own_s)
    link = GatewayLink(harness._control, harness.heart, harness.gateway, 5.0, clock=lambda: now)
    link.hear(Peers(gateway="aaaa", heartbeat_s=asked_s))
    now = most_s - 0.1
    assert not link.abandoned
    now = most_s + 0.1
    assert link.abandoned


def test_a_message_without_a_route_is_for_whoever_gets_it(context: Context) -> None:
    member = Harness(context).membership
    assert member.concerns("any", None)
    member.hear(member.gateways[0], Peers(gateway="aaaa"))
    assert member.concerns("aaaa1", None)
    assert not member.concerns("bbbb1", None)
    assert not member.concerns("aaaa1", Route(thinker="x", token2wav="two"))
    assert member.concerns("aaaa1", Route(thinker="x", token2wav=INSTANCE))


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("advertise", "tcp://far:1", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://far:*", "far:1"]),
        # On any free port.
        ("inbox", "tcp://127.0.0.1:*", ["tcp://:*", "tcp://h:**", "http://h:*", "tcp://h:"]),
    ],
)
def test_an_address_to_tell_is_one_that_can_be_reached(key: str, right: str, wrong: list[str]) -> None:
    def config(address: str) -> Config:
        values = {"stages": {"talker": {key: address}}, "security": {"internal_network": True}}
        return Config.model_validate(values)

    assert getattr(config(right).stages.talker, key) == right
    for each in wrong:
        with pytest.raises(ValueError, match=key):
            config(each)

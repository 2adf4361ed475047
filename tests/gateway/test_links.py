"""Connections to stages: those that end while requests are in work, credits, shortages of descriptors."""

import asyncio
import errno
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
import zmq.asyncio

from gateway import process
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.stage_transport import StageTransport
from gateway.http.server import HttpServer
from omnirelay.errors import OmniRelayError, StageUnavailableError
from shared.ending import STOP_SIGNALS
from shared.messages import Credit, Mark, StageLoad, StageName, control_identity
from shared.transport import routing
from shared.transport.wire import Decoder, encode
from tests.gateway.bench import Bench, Configure, Patch, bench, run
from tests.gateway.fake_stages import FakeReplica, until
from tests.gateway.http_bench import http_bench, http_gateway
from tests.gateway.scripted import SOON_S, Script, recovering, whole
from tests.shared.support import free_address
from tests.support.ports import free_ports


def listens_again(b: Bench, address: str) -> bool:
    """ZeroMQ closes a socket in its own time."""
    try:
        b.stages.listen(address)
    except zmq.ZMQError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


async def other_thinker(b: Bench) -> tuple[FakeReplica, zmq.asyncio.Socket]:
    """One more thinker, which alone gets requests from now on, and where it takes them."""
    address = free_address()
    listener = b.stages.listen(address)
    other = b.stages.add("thinker", "other", address)
    b.stages.replica("thinker").draining = True
    await until(lambda: [each.name for each in b.registry.ready("thinker")] == ["other"])
    return other, listener


@pytest.mark.parametrize(("sender", "receiver"), [("thinker", "talker"), ("talker", "token2wav")])
async def test_requests_that_went_over_it_are_begun_anew_and_no_others(
    configure: Configure, sender: StageName, receiver: StageName
) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        other = b.stages.add(receiver, "other", free_address())
        await until(lambda: b.registry.count(receiver, "ready") == 2)
        script = Script(b)
        answers = [client.chat("Hi", seed=number) for number in range(4)]
        await b.stages.request(3)
        routes = [each.route.replica(receiver) for each in b.stages.requests if each.route]
        assert set(routes) == {"first", "other"}
        over_it = routes.count("other")
        other.draining = True
        await until(lambda: b.registry.count(receiver, "ready") == 1)
        b.stages.replica(sender).breaks = {"other": 1}
        await b.stages.request(3 + over_it)
        lost = [
            f"{each.request_id}.1"
            for each in b.stages.requests[:4]
            if each.route and each.route.replica(receiver) == "other"
        ]
        assert {each.request_id for each in b.stages.requests[4:]} == set(lost)
        # Another one, of whom nobody is served, and the same news again.
        b.stages.replica(sender).breaks = {"other": 1, "third": 7}
        for request in b.stages.requests:
            await script.play(request)
        for answer in answers:
            await whole(answer, script)
        assert b.process.status().resumes == over_it
        # Not at the sender, which lives.
        count = b.process.gateway.metrics.registry.get_sample_value(
            "omnirelay_request_resumes_total", {"stage": receiver, "reason": "cut off"}
        )
        assert count == over_it


async def test_what_a_thinker_was_asked_is_asked_again_if_nothing_came_of_it(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        other, listener = await other_thinker(b)
        script = Script(b)
        begun, lost = client.chat("Hi", seed=1), client.chat("Hi", seed=2)
        first = await b.stages.request(0)
        second = await b.stages.request(1)
        await script.play(first, 0.5, 0.0, 0.0)
        record = b.process.gateway.dispatcher.of(first.request_id)
        await until(lambda: record is not None and record.record.text.next_seq > 0)
        listener.close(0)
        await until(lambda: listens_again(b, other.inbox))
        again = await b.stages.request(2)
        assert again.request_id == f"{second.request_id}.1"
        await script.play(first)
        await script.play(again)
        await whole(begun, script)
        await whole(lost, script)
        assert b.process.status().resumes == 1


async def test_a_thinker_that_crashes_costs_one_attempt(configure: Configure) -> None:
    """Its connection ends at once, its silence is noticed later; until then nothing is given to it."""
    async with bench(recovering(configure, heartbeat_timeout_s=1.0)) as b, b.client() as client:
        crashing, listener = await other_thinker(b)
        script = Script(b)
        answer = client.chat("Hi", seed=1)
        await b.stages.request(0)
        crashing.silent = True
        listener.close(0)
        await until(lambda: b.registry.count("thinker", "down") == 1)
        b.stages.replica("thinker").draining = False
        again = await b.stages.request(1)
        await script.play(again)
        await whole(answer, script)
        assert b.process.status().resumes == 1


async def test_who_crashed_is_not_found_again_by_another_way(configure: Configure) -> None:
    """Senders look at their connections when they come round: those that are idle do later."""
    async with bench(recovering(configure, heartbeat_timeout_s=3.0)) as b, b.client() as client:
        stages = b.stages
        for name in ("t0", "t1", "t2"):
            address = free_address()
            stages.listen(address)
            stages.add("thinker", name, address)
        # Who stays has more to do than who crashes.
        stages.add("talker", "other", free_address()).load = StageLoad(running=3)
        await until(
            lambda: b.registry.count("thinker", "ready") == 4 and b.registry.count("talker", "ready") == 2
        )
        await until(lambda: [each.name for each in b.registry.ready("talker")] == ["first", "other"])
        script = Script(b)
        answer = client.chat("Hi", seed=1)
        first = await stages.request(0)
        assert first.route is not None
        assert first.route.talker == "first"
        stages.replica("talker").silent = True
        stages.replica("thinker", first.route.thinker).breaks = {"first": 1}
        again = await stages.request(1)
        assert again.route is not None
        assert again.route.talker == "other"
        await script.play(again)
        await whole(answer, script)
        assert b.process.status().resumes == 1


CHANNEL = "0123456789abcdef"
SOUND = bytes(700_000)


class Listener:
    """A replica's control socket, without the replica."""

    def __init__(self, b: Bench, stage: StageName, name: str) -> None:
        self.identity = control_identity(stage, name)
        self.socket = b.stages.context.socket(zmq.DEALER)
        self.socket.set(zmq.IDENTITY, self.identity.encode())
        self.socket.connect(b.config.gateway.control)
        self._decoder: Decoder[Any] = Decoder(Credit)

    async def credit(self) -> Credit:
        credit: Credit = self._decoder.decode(await self.socket.recv_multipart())
        return credit

    async def send(self, message: object) -> None:
        await self.socket.send_multipart(encode(message))


async def test_the_gateway_answers_marks_of_stages(tcp: Bench) -> None:
    listener = Listener(tcp, "token2wav", "second")
    # It is known by what it says.
    await listener.send(Credit(sender=listener.identity, channel=CHANNEL, position=1))
    assert (await listener.credit()).position == 1
    await tcp.stages.events.send_multipart([b"spam"])
    await tcp.stages.send(Mark(sender=listener.identity, channel=CHANNEL, position=2))
    assert await listener.credit() == Credit(sender=listener.identity, channel=CHANNEL, position=2)
    listener.socket.close(0)


async def test_credit_for_a_stage_is_passed_on_and_for_nobody_dropped(tcp: Bench) -> None:
    thinker, talker = Listener(tcp, "thinker", "second"), Listener(tcp, "talker", "second")
    for sender in ("thinker.gone", "gateway.gone", thinker.identity):
        await thinker.send(Credit(sender=sender, channel=CHANNEL, position=1))
    assert (await thinker.credit()).sender == thinker.identity
    await talker.send(Credit(sender=thinker.identity, channel=CHANNEL, position=2))
    assert (await thinker.credit()).position == 2
    assert not tcp.process._transport.refused()
    thinker.socket.close(0)
    talker.socket.close(0)


async def test_requests_beyond_the_window_wait_for_the_thinkers_credit(configure: Configure) -> None:
    config = configure().model_copy(update={"window_bytes": 2**20})
    async with bench(config) as b, b.client() as client:
        b.stages.generous = False
        b.stages.serve([5, 6])
        (queue,) = b.process._transport._thinkers._queues.values()
        answers = [client.chat(f"Question {n}", audio=SOUND, speech=False) for n in range(5)]
        replies = asyncio.gather(*(answer.result() for answer in answers))
        await until(lambda: queue.backlog_bytes > 3 * len(SOUND))
        # The loop serves others meanwhile.
        assert (await client.status()).ready
        await b.stages.request(0)
        assert len(b.stages.requests) == 1
        assert queue.outstanding_bytes <= 2**20
        b.stages.generous = True
        assert len(await replies) == 5
        assert queue.backlog_bytes == 0


async def test_a_thinker_that_gives_more_credit_than_it_took_is_refused(tcp: Bench) -> None:
    link = tcp.process._transport
    (queue,) = link._thinkers._queues.values()
    listener = Listener(tcp, "thinker", "second")
    for channel, position in ((queue._window.channel, 10**9), ("f" * 16, 10**9)):
        await listener.send(Credit(sender=link._sending.sender, channel=channel, position=position))
    await until(lambda: link.refused()["message_invalid"] == 1)
    assert queue.outstanding_bytes == 0
    assert tcp.process.status().ready
    listener.socket.close(0)


class Failing:
    """Fails instead of calling a function, as often as it is told to."""

    def __init__(self, monkeypatch: Patch, owner: Any, name: str, error: Exception) -> None:
        self.left = 0
        self.failed = 0
        call = getattr(owner, name)

        def instead(*args: Any, **kwargs: Any) -> Any:
            if self.left:
                self.left -= 1
                self.failed += 1
                raise error
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, name, instead)


def nothing_is_held(b: Bench) -> bool:
    gateway = b.process.gateway
    admission = gateway._admission
    return not (
        admission._places.used
        or admission._thinking.used
        or admission._speaking.used
        or gateway._active
        or gateway.held.total
    )


async def test_thinkers_out_of_reach_are_tried_again(configure: Configure, monkeypatch: Patch) -> None:
    shortage = zmq.ZMQError(errno.EMFILE)
    opening = Failing(monkeypatch, routing, "PushQueue", shortage)
    opening.left = 10**6

    async with http_bench(configure(http_gateway()), ready=False) as b:
        await until(lambda: opening.failed > 2, "attempts to connect")
        assert (await b.http.get("/readyz")).status_code == 503
        assert (await b.post()).status_code == 503
        assert nothing_is_held(b)
        opening.left = 0
        await until(lambda: b.process.status().ready, "readiness")
        assert (await b.http.get("/readyz")).status_code == 200
        b.stages.serve(b.encode("Hello"))
        assert (await b.post()).json()["choices"][0]["message"]["content"] == "Hello"
        await until(lambda: nothing_is_held(b), "the end of all requests")


async def test_a_thinker_whose_inbox_nobody_answers_at_is_not_ready(tcp: Bench) -> None:
    (port,) = free_ports(1)
    inbox = f"tcp://127.0.0.1:{port}"
    tcp.stages.add("thinker", "second", inbox)
    await until(lambda: tcp.registry.get("thinker", "second"), "its heartbeat")
    second = next(each for each in tcp.registry.replicas() if each.name == "second")
    first_seen = second.seen
    await until(lambda: second.seen > first_seen, "the next one")
    assert [each.name for each in tcp.registry.ready("thinker")] == ["first"]
    tcp.stages.listen(inbox)
    await until(lambda: len(tcp.registry.ready("thinker")) == 2, "readiness")


@pytest.fixture
def _signals() -> Iterator[None]:
    """A gateway that ends leaves its process deaf for signals."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_signals")
def test_the_process_ends_with_a_server_that_fails(configure: Configure, monkeypatch: Patch) -> None:
    serving = Failing(monkeypatch, HttpServer, "on_tick", ZeroDivisionError("inside"))
    monkeypatch.setattr(process, "limit_end", lambda: None)
    monkeypatch.setattr(process, "limit_collections", lambda: None)
    serving.left = 1
    with pytest.raises(ZeroDivisionError):
        run(process.run(configure(http_gateway())))


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (StageTransport, "think", StageUnavailableError("no thinker is known here")),
        (StageTransport, "think", ZeroDivisionError("inside")),
        (StageTransport, "poll", zmq.ZMQError(errno.EMFILE)),
        (StageTransport, "breaks", ZeroDivisionError("inside")),
        (Dispatcher, "begin", ZeroDivisionError("inside")),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
async def test_one_failure_under_load_harms_at_most_one_request(
    configure: Configure, monkeypatch: Patch, owner: Any, name: str, error: Exception
) -> None:
    failing = Failing(monkeypatch, owner, name, error)
    draw = random.Random(name)

    config = configure({}, max_active=2, max_queued=40)
    async with bench(config) as b, b.client() as client:
        b.stages.serve(b.encode("Hello"))

        async def ask(number: int) -> str:
            try:
                return (await client.chat("Hi", seed=number).result()).text
            except OmniRelayError as failed:
                return failed.code

        asked = [asyncio.create_task(ask(number)) for number in range(20)]
        await asyncio.wait(asked[: draw.randint(1, 10)])
        failing.left = 1
        told = await asyncio.gather(*asked)
        if not failing.failed:
            told.append(await ask(20))
        await until(lambda: failing.failed == 1, "the failure")
        assert told.count("Hello") >= len(told) - 1
        assert await ask(21) == "Hello"
        await until(lambda: nothing_is_held(b), "the end of all requests")


async def test_while_the_thinker_is_missing_the_queue_stays_a_queue(configure: Configure) -> None:
    config = recovering(configure, {"max_active": 2}, heartbeat_timeout_s=SOON_S, resume_wait_s=30.0)
    async with bench(config) as b, b.client() as client:
        dispatcher = b.process.gateway.dispatcher
        answers = [client.chat("Hi", speech=False, seed=number) for number in range(12)]
        await until(lambda: b.counts["queued"] == 10)
        b.stages.alive.discard("thinker")
        await until(lambda: len(dispatcher._waiting) == 2, "the loss of the thinker")
        b.process.gateway.start_waiting()
        assert (b.counts["queued"], len(dispatcher._waiting)) == (10, 2)
        b.stages.serve(b.encode("Hello"))
        b.stages.alive.add("thinker")
        for answer in answers:
            assert (await answer.result()).text == "Hello"
        await until(lambda: nothing_is_held(b), "the end of all requests")

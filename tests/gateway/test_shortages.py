"""The gateway runs short of descriptors, or one of its parts fails: nothing leaks, and nothing stays so."""

import asyncio
import errno
import random
from typing import Any

import pytest
import zmq

from gateway import process
from gateway.dispatch.dispatcher import Dispatcher
from gateway.dispatch.stage_transport import StageTransport
from gateway.http.server import HttpServer
from omnirelay.errors import OmniRelayError, StageUnavailableError
from shared.transport import routing
from tests.gateway.bench import Bench, Configure, bench, run
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import http_bench, http_gateway
from tests.gateway.recovering import SOON_S
from tests.support.ports import free_ports


class Failing:
    """Fails instead of calling a function, as often as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
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


async def test_a_thinker_that_cannot_be_connected_to_is_not_ready_and_is_tried_again(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    registry = tcp.process.gateway.registry
    await until(lambda: registry.get("thinker", "second"), "its heartbeat")
    second = next(each for each in registry.replicas() if each.name == "second")
    first_seen = second.seen
    await until(lambda: second.seen > first_seen, "the next one")
    assert [each.name for each in registry.ready("thinker")] == ["first"]
    tcp.stages.listen(inbox)
    await until(lambda: len(registry.ready("thinker")) == 2, "readiness")


def test_the_process_ends_with_a_server_that_fails(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    configure: Configure, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception
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
    gateway = {"heartbeat_timeout_s": SOON_S, "resume_wait_s": 30.0, "resume_attempts": 3}

    async with bench(configure(gateway, max_active=2)) as b, b.client() as client:
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

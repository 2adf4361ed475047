"""Connections that end while requests are in work: what was under way on them is asked for again."""

import errno
from collections.abc import Callable

import pytest
import zmq

from shared.config import Config
from shared.messages import StageName
from tests.gateway.bench import Bench, bench, run
from tests.gateway.fake_stages import until
from tests.gateway.scripted import Script, whole
from tests.shared.support import free_address

Configure = Callable[..., Config]


def listens_again(b: Bench, address: str) -> bool:
    """ZeroMQ closes a socket in its own time."""
    try:
        b.stages.listen(address)
    except zmq.ZMQError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def settled(configure: Configure) -> Config:
    return configure({"heartbeat_timeout_s": 10.0, "resume_attempts": 3, "resume_wait_s": 10.0})


@pytest.mark.parametrize(("sender", "receiver"), [("thinker", "talker"), ("talker", "token2wav")])
def test_requests_that_went_over_it_are_begun_anew_and_no_others(
    configure: Configure, sender: StageName, receiver: StageName
) -> None:
    async def scenario() -> None:
        async with bench(settled(configure)) as b, b.client() as client:
            other = b.stages.add(receiver, "other", free_address())
            registry = b.process.gateway.registry
            await until(lambda: registry.count(receiver, "ready") == 2)
            script = Script(b)
            answers = [client.chat("Hi", seed=number) for number in range(4)]
            await b.stages.request(3)
            routes = [each.route.replica(receiver) for each in b.stages.requests if each.route]
            assert sorted(name or "" for name in routes) == ["first", "first", "other", "other"]
            other.draining = True
            await until(lambda: registry.count(receiver, "ready") == 1)
            b.stages.replica(sender).breaks = {"other": 1}
            await b.stages.request(5)
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
            assert b.process.status().resumes == 2

    run(scenario())


def test_what_a_thinker_was_asked_is_asked_again_if_nothing_came_of_it(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(settled(configure)) as b, b.client() as client:
            address = free_address()
            listener = b.stages.listen(address)
            b.stages.add("thinker", "other", address)
            b.stages.replica("thinker").draining = True
            registry = b.process.gateway.registry
            await until(lambda: [each.name for each in registry.ready("thinker")] == ["other"])
            script = Script(b)
            begun, lost = client.chat("Hi", seed=1), client.chat("Hi", seed=2)
            first = await b.stages.request(0)
            second = await b.stages.request(1)
            await script.play(first, 0.5, 0.0, 0.0)
            record = b.process.gateway.dispatcher.of(first.request_id)
            await until(lambda: record is not None and record.record.text.next_seq > 0)
            listener.close(0)
            await until(lambda: listens_again(b, address))
            again = await b.stages.request(2)
            assert again.request_id == f"{second.request_id}.1"
            await script.play(first)
            await script.play(again)
            await whole(begun, script)
            await whole(lost, script)
            assert b.process.status().resumes == 1

    run(scenario())

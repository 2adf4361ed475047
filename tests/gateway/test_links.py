"""Connections that end while requests are in work: what was under way on them is asked for again."""

import errno

import pytest
import zmq

from shared.config import Config
from shared.messages import StageLoad, StageName
from tests.gateway.bench import Bench, Configure, bench
from tests.gateway.fake_stages import until
from tests.gateway.scripted import Script, whole
from tests.shared.support import free_address


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
async def test_requests_that_went_over_it_are_begun_anew_and_no_others(
    configure: Configure, sender: StageName, receiver: StageName
) -> None:
    async with bench(settled(configure)) as b, b.client() as client:
        other = b.stages.add(receiver, "other", free_address())
        registry = b.process.gateway.registry
        await until(lambda: registry.count(receiver, "ready") == 2)
        script = Script(b)
        answers = [client.chat("Hi", seed=number) for number in range(4)]
        await b.stages.request(3)
        routes = [each.route.replica(receiver) for each in b.stages.requests if each.route]
        assert set(routes) == {"first", "other"}
        over_it = routes.count("other")
        other.draining = True
        await until(lambda: registry.count(receiver, "ready") == 1)
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


async def test_a_thinker_that_crashes_costs_one_attempt(configure: Configure) -> None:
    """Its connection ends at once, its silence is noticed later; until then nothing is given to it."""

    config = configure({"heartbeat_timeout_s": 1.0, "resume_attempts": 3, "resume_wait_s": 10.0})
    async with bench(config) as b, b.client() as client:
        address = free_address()
        listener = b.stages.listen(address)
        crashing = b.stages.add("thinker", "other", address)
        b.stages.replica("thinker").draining = True
        registry = b.process.gateway.registry
        await until(lambda: [each.name for each in registry.ready("thinker")] == ["other"])
        script = Script(b)
        answer = client.chat("Hi", seed=1)
        await b.stages.request(0)
        crashing.silent = True
        listener.close(0)
        replica = registry.get("thinker", "other")
        assert replica is not None
        await until(lambda: replica.down)
        b.stages.replica("thinker").draining = False
        again = await b.stages.request(1)
        await script.play(again)
        await whole(answer, script)
        assert b.process.status().resumes == 1


async def test_who_crashed_is_not_found_again_by_another_way(configure: Configure) -> None:
    """Senders look at their connections when they come round: those that are idle do later."""

    config = configure({"heartbeat_timeout_s": 3.0, "resume_attempts": 3, "resume_wait_s": 10.0})
    async with bench(config) as b, b.client() as client:
        stages = b.stages
        for name in ("t0", "t1", "t2"):
            address = free_address()
            stages.listen(address)
            stages.add("thinker", name, address)
        # Who stays has more to do than who crashes.
        stages.add("talker", "other", free_address()).load = StageLoad(running=3)
        registry = b.process.gateway.registry
        await until(
            lambda: registry.count("thinker", "ready") == 4 and registry.count("talker", "ready") == 2
        )
        await until(lambda: [each.name for each in registry.ready("talker")] == ["first", "other"])
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

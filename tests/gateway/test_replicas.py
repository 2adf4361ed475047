"""Several replicas of a stage: which of them serves a request, and how one leaves."""

from functools import partial

import pytest

from omnirelay import errors
from shared.messages import STAGES, StageLoad, StageName
from tests.gateway.bench import Bench, Configure, bench
from tests.gateway.fake_stages import until
from tests.gateway.recovering import (
    SOON_S,
    half_played,
    recovering,
)
from tests.gateway.scripted import Script, whole
from tests.support.ports import free_ports

pytestmark = pytest.mark.usefixtures("no_pause")


async def second_of_each(b: Bench) -> None:
    for stage, port in zip(STAGES, free_ports(3), strict=True):
        b.stages.add(stage, "other", f"tcp://127.0.0.1:{port}")
    b.stages.listen(b.stages.replica("thinker", "other").inbox)
    registry = b.process.gateway.registry
    await until(lambda: all(registry.count(stage, "ready") == 2 for stage in STAGES))
    both = {"first", "other"}
    senders = [each for each in b.stages.replicas if each.stage != "token2wav"]
    await until(lambda: all(peers_of(b, each.stage, each.name) == both for each in senders))


def peers_of(b: Bench, stage: StageName, name: str) -> set[str]:
    """Whom a replica has said that it knows."""
    replica = b.process.gateway.registry.get(stage, name)
    return set(replica.peers) if replica is not None else set()


def routes(b: Bench, stage: StageName) -> list[str | None]:
    return [request.route.replica(stage) for request in b.stages.requests if request.route is not None]


async def test_requests_go_where_the_least_work_is(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        await second_of_each(b)
        b.stages.replica("talker", "other").load = StageLoad(running=5)
        b.stages.replica("thinker").load = StageLoad(running=2, waiting=3)
        registry = b.process.gateway.registry
        await until(lambda: [each.work[0] for each in registry.ready("thinker")] == [1, 5])
        await until(lambda: [each.work[0] for each in registry.ready("talker")] == [1, 5])
        for number in range(3):
            client.chat("Hi", seed=number)
            await b.stages.request(number)
        assert routes(b, "thinker") == ["other"] * 3
        assert routes(b, "talker") == ["first"] * 3


async def test_requests_that_come_together_are_spread(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        await second_of_each(b)
        for number in range(8):
            client.chat("Hi", seed=number)
        await b.stages.request(7)
        for stage in STAGES:
            assert 3 <= routes(b, stage).count("first") <= 5


async def test_only_those_who_know_each_other_serve_a_request(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        await second_of_each(b)
        b.stages.replica("thinker").deaf_to_peers = True
        talker = b.stages.replica("talker", "other")
        talker.deaf_to_peers = True
        await until(lambda: not peers_of(b, "thinker", "first") and not peers_of(b, "talker", "other"))
        for number in range(4):
            client.chat("Hi", seed=number)
            await b.stages.request(number)
        assert routes(b, "thinker") == ["other"] * 4
        assert routes(b, "talker") == ["first"] * 4


async def test_a_replica_where_a_request_failed_is_avoided(configure: Configure) -> None:
    """It has little to do, because it fails everything."""

    async with bench(recovering(configure)) as b, b.client() as client:
        await second_of_each(b)
        for stage in STAGES:
            b.stages.replica(stage, "other").load = StageLoad(running=9)
        registry = b.process.gateway.registry
        await until(lambda: all(registry.ready(stage)[-1].work >= (9, 0) for stage in STAGES))
        script = Script(b)
        answer = client.chat("Hi")
        first = await b.stages.request(0)
        await b.stages.fail(first.request_id, "talker", "stage_failed", "trouble")
        second = await b.stages.request(1)
        assert routes(b, "thinker") == ["first", "first"]
        assert routes(b, "talker") == ["first", "other"]
        await script.play(second)
        await whole(answer, script)


async def test_a_lost_replica_costs_only_its_own_requests_an_attempt(configure: Configure) -> None:
    async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
        await second_of_each(b)
        script = Script(b)
        answers = [client.chat("Hi", seed=number) for number in range(6)]
        await b.stages.request(5)
        lost = [each for each in b.stages.requests if each.route is not None and each.route.talker == "other"]
        b.stages.replica("talker", "other").silent = True
        await b.stages.request(5 + len(lost))
        resumed = b.stages.requests[6:]
        assert {each.request_id for each in resumed} == {f"{each.request_id}.1" for each in lost}
        assert {each.route.talker for each in resumed if each.route} == {"first"}
        for request in b.stages.requests:
            if request not in lost:
                await script.play(request)
        for answer in answers:
            await whole(answer, script)


async def test_a_draining_stage_gets_nothing_new_and_ends_what_it_has(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        await second_of_each(b)
        script = Script(b)
        b.stages.replica("talker", "other").load = StageLoad(running=9)
        registry = b.process.gateway.registry
        await until(lambda: [each.work[0] for each in registry.ready("talker")] == [1, 9])
        has = client.chat("Hi", seed=0)
        first = await b.stages.request(0)
        drained = b.stages.replica("talker")
        drained.draining = True
        await until(lambda: b.process.gateway.registry.count("talker", "draining") == 1)
        assert not drained.released
        new = client.chat("Hi", seed=1)
        second = await b.stages.request(1)
        assert routes(b, "talker") == ["first", "other"]
        await script.play(first)
        await whole(has, script)
        await until(lambda: drained.released)
        await drained.leave()
        await script.play(second)
        await whole(new, script)
        await until(lambda: b.process.gateway.registry.get("talker", "first") is None)
        assert b.process.status().resumes == 0


async def test_what_a_drained_stage_has_not_ended_goes_on_elsewhere(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        script, answer, _ = await half_played(b, client)
        drained = b.stages.replica("talker")
        drained.draining = True
        await until(lambda: b.process.gateway.registry.state("talker") == "draining")
        with pytest.raises(errors.StageUnavailableError, match="talker is draining"):
            await client.chat("Hi").result()
        assert not drained.released
        await drained.leave()
        b.stages.add("talker", "second", drained.inbox)
        await script.play(await b.stages.request(1))
        await whole(answer, script)


async def test_an_address_that_nobody_can_reach_is_refused(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client():

        def refused_more_than(before: int) -> bool:
            return b.process.status().refused.get("message_invalid", 0) > before

        for inbox in ("http://x:1", "tcp://h:0", "tcp://0.0.0.0:*", "tcp://a b:1", "tcp://*", "x"):
            before = b.process.status().refused.get("message_invalid", 0)
            b.stages.add("talker", f"to {inbox}", inbox)
            await until(partial(refused_more_than, before))
        assert b.process.gateway.registry.count("talker", "ready") == 1


async def test_who_listens_everywhere_is_reached_where_it_comes_from(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client():
        for inbox in ("tcp://0.0.0.0:5581", "tcp://*:5582", "tcp://[::]:5583"):
            b.stages.add("talker", inbox, inbox)
        registry = b.process.gateway.registry
        await until(lambda: registry.count("talker", "ready") == 4)
        told = {each.name: each.inbox for each in b.stages.replicas if each.stage == "talker"}
        reached = registry.addresses("talker")
        assert [reached[name] for name in told if name != "first"] == [
            "tcp://127.0.0.1:5581",
            "tcp://127.0.0.1:5582",
            "tcp://127.0.0.1:5583",
        ]


async def test_a_gateway_that_ends_says_so_to_its_stages(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client():
        assert all(each.gateway == b.process.gateway.name for each in b.stages.replicas)
        await b.process.stop()
        await until(lambda: all(each.gateway is None for each in b.stages.replicas))


async def test_what_a_replica_never_confirmed_is_forgotten_with_it(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.dispatch.registry.FORGET_S", 2 * SOON_S)

    async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
        ledger = b.process.gateway.dispatcher.aborts
        answer = client.chat("Hi")
        await b.stages.request(0)
        b.stages.replica("talker").silent = True
        answer.cancel()
        with pytest.raises(errors.CancelledRequestError):
            await answer.result()
        assert ledger.unconfirmed("talker", "first")
        await until(lambda: b.process.gateway.registry.get("talker", "first") is None)
        await until(lambda: not ledger._open)

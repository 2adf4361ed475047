"""Several replicas of a stage: which of them serves a request, how one leaves, and what ends engines."""

from functools import partial

import pytest

from omnirelay import AsyncClient, errors
from omnirelay.client.answer import AsyncAnswer
from shared.messages import STAGES, StageLoad, StageName, ThinkRequest
from tests.gateway.bench import Bench, Configure, Patch, bench, fails
from tests.gateway.fake_stages import FakeReplica, until
from tests.gateway.scripted import RECOVERING, SOON_S, Script, half_played, is_lost, recovering, seen, whole
from tests.support.ports import free_ports

pytestmark = pytest.mark.usefixtures("no_pause")
GATEWAY = RECOVERING


async def second_of_each(b: Bench) -> None:
    for stage, port in zip(STAGES, free_ports(3), strict=True):
        b.stages.add(stage, "other", f"tcp://127.0.0.1:{port}")
    b.stages.listen(b.stages.replica("thinker", "other").inbox)
    await until(lambda: all(b.registry.count(stage, "ready") == 2 for stage in STAGES))
    both = {"first", "other"}
    senders = [each for each in b.stages.replicas if each.stage != "token2wav"]
    await until(lambda: all(peers_of(b, each.stage, each.name) == both for each in senders))


def peers_of(b: Bench, stage: StageName, name: str) -> set[str]:
    """Whom a replica has said that it knows."""
    replica = b.registry.get(stage, name)
    return set(replica.peers) if replica is not None else set()


def routes(b: Bench, stage: StageName) -> list[str | None]:
    return [request.route.replica(stage) for request in b.stages.requests if request.route is not None]


async def test_only_those_who_know_each_other_serve_a_request(tcp: Bench, client: AsyncClient) -> None:
    await second_of_each(tcp)
    tcp.stages.replica("thinker").deaf_to_peers = True
    talker = tcp.stages.replica("talker", "other")
    talker.deaf_to_peers = True
    await until(lambda: not peers_of(tcp, "thinker", "first") and not peers_of(tcp, "talker", "other"))
    for number in range(4):
        client.chat("Hi", seed=number)
        await tcp.stages.request(number)
    assert routes(tcp, "thinker") == ["other"] * 4
    assert routes(tcp, "talker") == ["first"] * 4


async def test_a_replica_where_a_request_failed_is_avoided(tcp: Bench, client: AsyncClient) -> None:
    """It has little to do, because it fails everything."""
    await second_of_each(tcp)
    for stage in STAGES:
        tcp.stages.replica(stage, "other").load = StageLoad(running=9)
    await until(lambda: all(tcp.registry.ready(stage)[-1].work >= (9, 0) for stage in STAGES))
    script = Script(tcp)
    answer = client.chat("Hi")
    first = await tcp.stages.request(0)
    await tcp.stages.fail(first.request_id, "talker", "stage_failed", "trouble")
    second = await tcp.stages.request(1)
    assert routes(tcp, "thinker") == ["first", "first"]
    assert routes(tcp, "talker") == ["first", "other"]
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


async def test_a_draining_stage_only_ends_what_it_has(tcp: Bench, client: AsyncClient) -> None:
    await second_of_each(tcp)
    script = Script(tcp)
    tcp.stages.replica("talker", "other").load = StageLoad(running=9)
    await until(lambda: [each.work[0] for each in tcp.registry.ready("talker")] == [1, 9])
    has = client.chat("Hi", seed=0)
    first = await tcp.stages.request(0)
    drained = tcp.stages.replica("talker")
    drained.draining = True
    await until(lambda: tcp.registry.count("talker", "draining") == 1)
    assert not drained.released
    new = client.chat("Hi", seed=1)
    second = await tcp.stages.request(1)
    assert routes(tcp, "talker") == ["first", "other"]
    await script.play(first)
    await whole(has, script)
    await until(lambda: drained.released)
    await drained.leave()
    await script.play(second)
    await whole(new, script)
    await until(lambda: tcp.registry.get("talker", "first") is None)
    assert tcp.process.status().resumes == 0


async def test_what_a_drained_stage_has_not_ended_goes_on_elsewhere(tcp: Bench, client: AsyncClient) -> None:
    script, answer, _ = await half_played(tcp, client)
    drained = tcp.stages.replica("talker")
    drained.draining = True
    await until(lambda: tcp.registry.state("talker") == "draining")
    await fails(client.chat("Hi"), errors.StageUnavailableError, "talker is draining")
    assert not drained.released
    await drained.leave()
    tcp.stages.add("talker", "second", drained.inbox)
    await script.play(await tcp.stages.request(1))
    await whole(answer, script)


async def test_an_address_that_nobody_can_reach_is_refused(tcp: Bench) -> None:
    def refused_more_than(before: int) -> bool:
        return tcp.process.status().refused.get("message_invalid", 0) > before

    for inbox in ("http://x:1", "tcp://h:0", "tcp://0.0.0.0:*", "tcp://a b:1", "tcp://*", "x"):
        before = tcp.process.status().refused.get("message_invalid", 0)
        tcp.stages.add("talker", f"to {inbox}", inbox)
        await until(partial(refused_more_than, before))
    assert tcp.registry.count("talker", "ready") == 1


async def test_who_listens_everywhere_is_reached_where_it_comes_from(tcp: Bench) -> None:
    for inbox in ("tcp://0.0.0.0:5581", "tcp://*:5582", "tcp://[::]:5583"):
        tcp.stages.add("talker", inbox, inbox)
    await until(lambda: tcp.registry.count("talker", "ready") == 4)
    told = {each.name: each.inbox for each in tcp.stages.replicas if each.stage == "talker"}
    reached = tcp.registry.addresses("talker")
    assert [reached[name] for name in told if name != "first"] == [
        "tcp://127.0.0.1:5581",
        "tcp://127.0.0.1:5582",
        "tcp://127.0.0.1:5583",
    ]


async def test_unconfirmed_aborts_go_with_their_replica(configure: Configure, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.dispatch.registry.FORGET_S", 2 * SOON_S)

    async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
        ledger = b.process.gateway.dispatcher.aborts
        answer = client.chat("Hi")
        await b.stages.request(0)
        b.stages.replica("talker").silent = True
        answer.cancel()
        await fails(answer, errors.CancelledRequestError)
        assert ledger.unconfirmed("talker", "first")
        await until(lambda: b.registry.get("talker", "first") is None)
        await until(lambda: not ledger._open)


STREAMS = 4
POISON = 2
BEGUN = (0.2, 0.2, 0.2)


def newest(b: Bench, stage: StageName) -> FakeReplica:
    return next(each for each in reversed(b.stages.replicas) if each.stage == stage)


async def dies(b: Bench, stage: StageName, report: list[ThinkRequest], code: str = "engine_failed") -> None:
    """Let a stage's engine raise: it reports requests and leaves; then start its successor."""
    before = newest(b, stage)
    for request in report:
        await b.stages.fail(request.request_id, stage, code, "the engine failed: KeyError()")
    await until(lambda: not any(b.process.gateway.dispatcher.of(each.request_id) for each in report))
    await before.leave()
    await until(lambda: b.registry.get(stage, before.name) is None)
    b.stages.add(stage, f"after-{before.name}", before.inbox)


async def is_killed(b: Bench, stage: StageName) -> None:
    """Take a replica's place, without a word of it."""
    before = newest(b, stage)
    before.silent = True
    b.stages.add(stage, f"after-{before.name}", before.inbox)


async def begun(b: Bench, client: AsyncClient, script: Script, count: int) -> list[AsyncAnswer]:
    """Requests whose answers have begun."""
    answers = [client.chat("Hi", seed=number) for number in range(count)]
    await b.stages.request(count - 1)
    for request in list(b.stages.requests):
        await script.play(request, *BEGUN)
        await seen(b, script, request, BEGUN)
    return answers


async def attempts(b: Bench, first: int, count: int, alone: tuple[StageName, ...]) -> list[ThinkRequest]:
    """The next attempts of so many requests, all at once, with this mark."""
    await b.stages.request(first + count - 1)
    found = b.stages.requests[first : first + count]
    assert [each.route.alone if each.route else None for each in found] == [alone] * count
    return found


async def finish(b: Bench, script: Script, first: int, answers: list[AsyncAnswer]) -> None:
    await b.stages.request(first + len(answers) - 1)
    for request in b.stages.requests[first:]:
        await script.play(request)
    for answer in answers:
        await whole(answer, script)


@pytest.mark.parametrize("reports", [True, False], ids=["raises", "without a word"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_request_that_ends_an_engine_again_is_refused_and_its_neighbours_are_not(
    configure: Configure, stage: StageName, reports: bool
) -> None:
    async with bench(recovering(configure, resume_attempts=1 if reports else 2)) as b, b.client() as client:
        script = Script(b)
        answers = await begun(b, client, script, STREAMS)
        first = 0
        for _ in range(1 if reports else 2):
            await attempts(b, first, STREAMS, ())
            if reports:
                await dies(b, stage, b.stages.requests[first:])
            else:
                await is_killed(b, stage)
            first += STREAMS
        tried = await attempts(b, first, STREAMS, (stage,))
        poison = next(each for each in tried if each.seed == POISON)
        await newest(b, stage).compute_alone(poison.request_id)
        if reports:
            await dies(b, stage, [poison], "poison_request")
        else:
            await is_killed(b, stage)
        await fails(answers.pop(POISON), errors.PoisonRequestError, f"the {stage}'s engine ended while")
        await finish(b, script, first + STREAMS, answers)


async def test_the_end_of_a_replica_is_enough(tcp: Bench, client: AsyncClient, script: Script) -> None:
    [answer] = await begun(tcp, client, script, 1)
    await dies(tcp, "talker", [])
    [tried] = await attempts(tcp, 1, 1, ("talker",))
    await newest(tcp, "talker").compute_alone(tried.request_id)
    await dies(tcp, "talker", [])
    await fails(answer, errors.PoisonRequestError)


async def test_only_suspects_computed_alone_are_refused(
    tcp: Bench, client: AsyncClient, script: Script
) -> None:
    """Else a suspect of another gateway may have been the reason, or an operator."""
    answers = await begun(tcp, client, script, 2)
    await dies(tcp, "talker", tcp.stages.requests[:2])
    tried = await attempts(tcp, 2, 2, ("talker",))
    await newest(tcp, "talker").compute_alone(tried[0].request_id)
    await newest(tcp, "talker").compute_alone(None)
    await is_killed(tcp, "talker")
    await attempts(tcp, 4, 2, ("talker",))
    await finish(tcp, script, 4, answers)


async def test_a_replica_that_comes_back_does_not_count(configure: Configure) -> None:
    async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
        script = Script(b)
        answers = [client.chat("Hi", seed=number) for number in range(2)]
        await b.stages.request(1)
        frozen = b.stages.replica("talker")
        frozen.silent = True
        await until(lambda: is_lost(b, "talker"))
        frozen.silent = False
        await attempts(b, 2, 2, ())
        await is_killed(b, "talker")
        await attempts(b, 4, 2, ())
        await finish(b, script, 4, answers)


async def test_a_stopped_stage_makes_no_suspect(tcp: Bench, client: AsyncClient, script: Script) -> None:
    answers = await begun(tcp, client, script, 1)
    talker = tcp.stages.replica("talker")
    talker.draining = True
    await until(lambda: tcp.registry.count("talker", "draining") == 1)
    await dies(tcp, "talker", [])
    await attempts(tcp, 1, 1, ())
    await finish(tcp, script, 1, answers)

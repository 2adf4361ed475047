"""Requests that end engines: they are found and refused, and cost the others nothing but time."""

import pytest

from omnirelay import AsyncClient, errors
from omnirelay.client.answer import AsyncAnswer
from shared.messages import STAGES, StageName, ThinkRequest
from tests.gateway.bench import Bench, Configure, bench
from tests.gateway.fake_stages import FakeReplica, until
from tests.gateway.recovering import SOON_S, is_lost, recovering, seen
from tests.gateway.scripted import Script, whole

pytestmark = pytest.mark.usefixtures("no_pause")

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
    await until(lambda: b.process.gateway.registry.get(stage, before.name) is None)
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
        with pytest.raises(errors.PoisonRequestError, match=f"the {stage}'s engine ended while"):
            await answers.pop(POISON).result()
        await finish(b, script, first + STREAMS, answers)


async def test_the_end_of_a_replica_is_enough_if_its_report_is_late(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        script = Script(b)
        [answer] = await begun(b, client, script, 1)
        await dies(b, "talker", [])
        [tried] = await attempts(b, 1, 1, ("talker",))
        await newest(b, "talker").compute_alone(tried.request_id)
        await dies(b, "talker", [])
        with pytest.raises(errors.PoisonRequestError):
            await answer.result()


async def test_a_suspect_that_was_not_computed_alone_is_not_refused(configure: Configure) -> None:
    """Else a suspect of another gateway may have been the reason, or an operator."""

    async with bench(recovering(configure)) as b, b.client() as client:
        script = Script(b)
        answers = await begun(b, client, script, 2)
        await dies(b, "talker", b.stages.requests[:2])
        tried = await attempts(b, 2, 2, ("talker",))
        await newest(b, "talker").compute_alone(tried[0].request_id)
        await newest(b, "talker").compute_alone(None)
        await is_killed(b, "talker")
        await attempts(b, 4, 2, ("talker",))
        await finish(b, script, 4, answers)


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


async def test_a_stage_that_is_stopped_makes_nobody_a_suspect(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        script = Script(b)
        answers = await begun(b, client, script, 1)
        talker = b.stages.replica("talker")
        talker.draining = True
        await until(lambda: b.process.gateway.registry.count("talker", "draining") == 1)
        await dies(b, "talker", [])
        await attempts(b, 1, 1, ())
        await finish(b, script, 1, answers)

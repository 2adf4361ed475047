"""Requests that end engines: they are found and refused, and cost the others nothing but time."""

import pytest

from omnirelay import AsyncClient, errors
from omnirelay.client.answer import AsyncAnswer
from shared.messages import STAGES, Alone, StageName, ThinkRequest
from shared.transport.wire import encode
from tests.gateway.bench import Bench
from tests.gateway.fake_stages import until
from tests.gateway.recovering import SOON_S, Configure, is_lost, recover, recovering, seen
from tests.gateway.scripted import Script, whole
from tests.gateway.test_replicas import routes, second_of_each

pytestmark = pytest.mark.usefixtures("no_pause")

STREAMS = 8
POISON = 3
BEGUN = (0.2, 0.2, 0.2)
PAST = (1.0, 0.8, 0.8)
"""Of the streams of an answer: beyond the place where it was, by as much as counts."""


async def engine_fails(b: Bench, stage: StageName, work: list[ThinkRequest]) -> None:
    """Report what a stage reports whose engine raises in a step, and start its successor."""
    before = next(each for each in reversed(b.stages.replicas) if each.stage == stage)
    for request in work:
        await b.stages.fail(request.request_id, stage, "engine_failed", "the engine failed: KeyError()")
    await before.leave()
    b.stages.add(stage, f"after-{before.name}", before.inbox)


async def is_killed(b: Bench, stage: StageName) -> None:
    """Take a replica's place, without a word of it."""
    before = next(each for each in reversed(b.stages.replicas) if each.stage == stage)
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


async def newcomer_waits(b: Bench, client: AsyncClient) -> AsyncAnswer:
    answer = client.chat("Hi", seed=100)
    await until(lambda: b.counts["queued"] == 1, "the newcomer stands in line")
    return answer


@pytest.mark.parametrize("stage", STAGES)
def test_who_ends_two_engines_is_refused_and_its_neighbours_are_not(
    configure: Configure, stage: StageName
) -> None:
    async def scenario(b: Bench, client: AsyncClient) -> None:
        script = Script(b)
        answers = await begun(b, client, script, STREAMS)
        await engine_fails(b, stage, b.stages.requests[:STREAMS])
        newcomer: AsyncAnswer | None = None
        for number in range(STREAMS):
            # One after another, each at a stage that has nothing else to do.
            tried = await b.stages.request(STREAMS + number)
            newcomer = newcomer or await newcomer_waits(b, client)
            assert tried.seed == number
            assert len(b.stages.requests) == STREAMS + number + 1
            assert len(b.process.gateway.dispatcher._attempts) == 1
            if number == POISON:
                await engine_fails(b, stage, [tried])
            elif number < STREAMS - 1:
                await script.play(tried, *PAST)
        with pytest.raises(errors.PoisonRequestError, match=f"the {stage}'s engine ended while"):
            await answers.pop(POISON).result()
        # The last one goes on; those that were cleared, and the newcomer, join it.
        await script.play(b.stages.requests[-1], *PAST)
        await b.stages.request(2 * STREAMS + STREAMS - 2)
        assert len(b.process.gateway.dispatcher._attempts) == STREAMS
        for request in b.stages.requests[2 * STREAMS - 1 :]:
            await script.play(request)
        assert newcomer is not None
        for answer in [*answers, newcomer]:
            await whole(answer, script)
        assert b.process.status().resumes == STREAMS

    recover(recovering(configure), scenario)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_is_killed_once_makes_nobody_a_suspect(configure: Configure, stage: StageName) -> None:
    """It may have been an operator: all go on at once, and a second time one after another."""

    async def scenario(b: Bench, client: AsyncClient) -> None:
        script = Script(b)
        answers = await begun(b, client, script, 3)
        await is_killed(b, stage)
        await b.stages.request(5)
        assert len(b.process.gateway.dispatcher._attempts) == 3
        await is_killed(b, stage)
        for number in range(6, 9):
            tried = await b.stages.request(number)
            assert len(b.process.gateway.dispatcher._attempts) == 1
            await script.play(tried, *PAST)
        await b.stages.request(10)
        for request in b.stages.requests[8:]:
            await script.play(request)
        for answer in answers:
            await whole(answer, script)

    recover(recovering(configure), scenario)


def test_two_kills_in_a_row_do_not_refuse_a_lone_request_and_a_third_does(configure: Configure) -> None:
    async def scenario(b: Bench, client: AsyncClient) -> None:
        script = Script(b)
        for kills in (2, 3):
            first = len(b.stages.requests)
            answer = client.chat("Hi")
            for number in range(kills):
                await b.stages.request(first + number)
                await is_killed(b, "talker")
            if kills == 2:
                await script.play(await b.stages.request(first + kills))
                await whole(answer, script)
            else:
                with pytest.raises(errors.PoisonRequestError):
                    await answer.result()

    recover(recovering(configure), scenario)


def test_progress_between_two_kills_clears_a_request(configure: Configure) -> None:
    async def scenario(b: Bench, client: AsyncClient) -> None:
        script = Script(b)
        answers = await begun(b, client, script, 2)
        await is_killed(b, "thinker")
        await b.stages.request(3)
        for request in b.stages.requests[2:4]:
            await script.play(request, *PAST)
            await seen(b, script, request, PAST)
        await is_killed(b, "thinker")
        await b.stages.request(5)
        for request in b.stages.requests[4:]:
            await script.play(request)
        for answer in answers:
            await whole(answer, script)

    recover(recovering(configure), scenario)


def test_a_replica_that_comes_back_does_not_count(configure: Configure) -> None:
    async def scenario(b: Bench, client: AsyncClient) -> None:
        script = Script(b)
        answers = [client.chat("Hi", seed=number) for number in range(2)]
        await b.stages.request(1)
        frozen = b.stages.replica("talker")
        frozen.silent = True
        await until(lambda: is_lost(b, "talker"))
        frozen.silent = False
        await b.stages.request(3)
        await is_killed(b, "talker")
        await b.stages.request(5)
        for request in b.stages.requests[4:]:
            await script.play(request)
        for answer in answers:
            await whole(answer, script)

    recover(recovering(configure, heartbeat_timeout_s=SOON_S), scenario)


def test_others_go_on_at_other_replicas_meanwhile(configure: Configure) -> None:
    async def scenario(b: Bench, client: AsyncClient) -> None:
        await second_of_each(b)
        script = Script(b)
        suspect = client.chat("Hi", seed=0)
        request = await b.stages.request(0)
        assert request.route is not None
        where = request.route.talker or ""
        spared = {"first": "other", "other": "first"}[where]
        await b.stages.fail(request.request_id, "talker", "engine_failed", "the engine failed")
        tried = await b.stages.request(1)
        assert tried.route is not None
        assert tried.route.talker == spared, "where it failed is avoided"
        others = [client.chat("Hi", seed=number) for number in range(1, 4)]
        await b.stages.request(4)
        assert routes(b, "talker")[2:] == [where] * 3
        await script.play(tried, *PAST)
        await seen(b, script, tried, PAST)
        more = client.chat("Hi", seed=5)
        late = await b.stages.request(5)
        assert late.route is not None
        assert late.route.talker == spared, "it is shared again"
        there = b.stages.replica("talker", spared)
        await until(lambda: there.cleared == [tried.request_id], "the stage knows")
        for each in b.stages.requests[1:]:
            await script.play(each)
        for answer in [suspect, *others, more]:
            await whole(answer, script)

    recover(recovering(configure), scenario)


def test_a_suspect_that_is_given_up_lets_the_next_one_be_tried(configure: Configure) -> None:
    async def scenario(b: Bench, client: AsyncClient) -> None:
        script = Script(b)
        answers = await begun(b, client, script, 3)
        await engine_fails(b, "thinker", b.stages.requests[:3])
        await b.stages.request(3)
        answers[0].cancel()
        answers[1].cancel()
        for answer in answers[:2]:
            with pytest.raises(errors.CancelledRequestError):
                await answer.result()
        last = await b.stages.request(4)
        assert last.seed == 2
        await script.play(last)
        await whole(answers[2], script)

    recover(recovering(configure), scenario)


@pytest.mark.parametrize("stage", STAGES)
def test_a_suspect_is_refused_only_where_the_stage_said_that_it_was_alone(
    configure: Configure, stage: StageName
) -> None:
    """Else a suspect of another gateway may have been the reason."""

    async def scenario(b: Bench, client: AsyncClient) -> None:
        script = Script(b)
        answers = await begun(b, client, script, 1)
        await engine_fails(b, stage, b.stages.requests[:1])
        b.stages.admits = False
        request = await b.stages.request(1)
        assert request.route is not None
        assert request.route.alone == (stage,)
        assert b.stages.requests[0].route is not None
        assert b.stages.requests[0].route.alone == ()
        await is_killed(b, stage)
        again = await b.stages.request(2)
        # Others are there: it comes again, and that counts as no attempt.
        for number in range(2, 7):
            await b.stages.fail(again.request_id, stage, "stage_reserved", "others are there")
            again = await b.stages.request(number + 1)
        b.stages.admits = True
        await script.play(again)
        await whole(answers[0], script)
        assert b.process.status().resumes == 2

    recover(recovering(configure), scenario)


def test_one_that_the_gateway_does_not_know_is_dropped_by_the_stage(configure: Configure) -> None:
    async def scenario(b: Bench, client: AsyncClient) -> None:
        talker = b.stages.replica("talker")
        alone = Alone(request_id="unknown", stage="talker", instance=talker.name)
        await talker.control.send_multipart(encode(alone))
        await until(lambda: talker.aborts == ["unknown"], "it is dropped")
        assert talker.begun == []

    recover(recovering(configure), scenario)

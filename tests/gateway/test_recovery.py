"""Stages that are lost while requests are with them: the clients see one unbroken answer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.client import AsyncGatewayClient
from shared import errors
from shared.config import Config
from shared.messages import STAGES, StageLoad, StageName, ThinkRequest
from shared.wire import encode
from tests.gateway.bench import Bench, bench, free_ports, run
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import http_bench, http_gateway
from tests.gateway.scripted import CHUNKS, CODES, Script, whole

Configure = Callable[..., Config]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.dispatch.PAUSE_S", 0.0)


SOON_S = 0.8
"""When silence counts, in tests that wait for it; in the others a slow machine must not look like it."""


def recovering(configure: Configure, **gateway: Any) -> Config:
    return configure({"heartbeat_timeout_s": 10.0, "resume_attempts": 3, "resume_wait_s": 10.0, **gateway})


def is_lost(b: Bench, stage: StageName) -> bool:
    replica = b.process.gateway.registry.get(stage, "first")
    return replica is not None and replica.down


async def goes_silent(b: Bench, stage: StageName, request: ThinkRequest) -> None:
    b.stages.replica(stage).silent = True
    await until(lambda: is_lost(b, stage))
    b.stages.add(stage, "second", b.stages.replica(stage).inbox)


async def hangs(b: Bench, stage: StageName, request: ThinkRequest) -> None:
    replica = b.stages.replica(stage)
    replica.busy_s = 1e6
    await until(lambda: is_lost(b, stage))
    replica.busy_s = 0.0


async def restarts(b: Bench, stage: StageName, request: ThinkRequest) -> None:
    b.stages.restart(stage)


async def leaves(b: Bench, stage: StageName, request: ThinkRequest) -> None:
    await b.stages.replica(stage).leave()
    b.stages.add(stage, "second", b.stages.replica(stage).inbox)


async def fails(b: Bench, stage: StageName, request: ThinkRequest) -> None:
    await b.stages.fail(request.request_id, stage, "queue_full", "no room")


async def is_cut_off(b: Bench, stage: StageName, request: ThinkRequest) -> None:
    b.stages.replica(stage).breaks = {"gateway": 1}


LOSSES = {
    "silent": goes_silent,
    "hung": hangs,
    "restarted": restarts,
    "left": leaves,
    "failed": fails,
    "cut off": is_cut_off,
}
POINTS = {
    "nothing": (0.0, 0.0, 0.0),
    "middle": (0.5, 0.5, 0.4),
    "text": (1.0, 0.3, 0.2),
    "codes": (1.0, 1.0, 0.6),
    "speech first": (0.5, 1.0, 0.8),
}


async def seen(b: Bench, script: Script, request: ThinkRequest, point: tuple[float, float, float]) -> None:
    """Wait until the gateway has taken what was sent up to a point."""
    active = b.process.gateway.dispatcher.of(request.request_id)
    assert active is not None
    record = active.record
    sizes = len(script.text), len(CODES), len(CHUNKS)
    lengths = [round(share * size) for share, size in zip(point, sizes, strict=True)]
    await until(
        lambda: [len(record.text.token_ids), len(record.codec.token_ids), record.audio.chunks] == lengths
    )


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loss", LOSSES)
def test_an_answer_goes_on_where_it_was(
    configure: Configure, loss: str, stage: StageName, point: str
) -> None:
    async def scenario() -> None:
        timeout_s = SOON_S if loss == "silent" else 10.0
        async with bench(recovering(configure, heartbeat_timeout_s=timeout_s)) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi", seed=3)
            first = await b.stages.request(0)
            await script.play(first, *POINTS[point])
            await seen(b, script, first, POINTS[point])
            if stage == "thinker" and point == "codes" and loss != "failed":
                # The talker has spoken to the end: it needs no thinker any more.
                await LOSSES[loss](b, stage, first)
                await script.play(first)
                await whole(answer, script)
                assert b.process.status().resumes == 0
                return
            await LOSSES[loss](b, stage, first)
            second = await b.stages.request(1)
            assert second.request_id == f"{first.request_id}.1"
            assert (second.seed, second.sampling, second.speech) == (3, first.sampling, first.speech)
            if point == "nothing":
                assert second.resume is None
            else:
                assert second.resume is not None
                assert second.resume.speech is not None
                shares = [
                    len(second.resume.text_token_ids) / len(script.text),
                    len(second.resume.speech.codec_token_ids) / len(CODES),
                    second.resume.speech.chunks / len(CHUNKS),
                ]
                assert shares == pytest.approx(POINTS[point], abs=0.06)
                assert (second.resume.finish_reason is not None) == (POINTS[point][0] == 1)
                assert (second.resume.speech.finish_reason is not None) == (POINTS[point][1] == 1)
            # What the lost attempt still sends is nobody's.
            await script.play(first)
            await script.play(second)
            done = await whole(answer, script)
            assert done.request_id == first.request_id
            for each in b.stages.replicas:
                if each.stage != stage or loss in ("hung", "failed", "cut off"):
                    assert each.aborts.count(first.request_id) >= 1 or each.name != "first"
            report = b.process.gateway.report(first.request_id)
            assert report is not None
            assert (report.state, report.resumes) == ("completed", 1)
            count = b.process.gateway.metrics.registry.get_sample_value(
                "omnirelay_request_resumes_total", {"stage": stage, "reason": loss}
            )
            assert count == b.process.status().resumes == 1

    run(scenario())


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_an_answer_in_text_only_needs_the_thinker_alone(configure: Configure, share: float) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi", speech=False)
            first = await b.stages.request(0)
            await script.play(first, share)
            await seen(b, script, first, (share, 0.0, 0.0))
            b.stages.alive -= {"talker", "token2wav"}
            await until(lambda: b.process.gateway.registry.state("talker") == "down")
            assert b.process.status().resumes == 0
            b.stages.restart("thinker")
            second = await b.stages.request(1)
            assert second.route is not None
            assert (second.route.thinker, second.route.talker, second.speech) == ("second", None, None)
            await script.play(second)
            await whole(answer, script, speech=False)

    run(scenario())


def test_speech_that_is_over_is_not_asked_for_again(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi")
            first = await b.stages.request(0)
            await script.play(first, text=0.5)
            await seen(b, script, first, (0.5, 1.0, 1.0))
            b.stages.alive -= {"talker", "token2wav"}
            b.stages.restart("thinker")
            second = await b.stages.request(1)
            assert second.speech is None
            assert second.resume is not None
            assert second.resume.speech is None
            await script.play(second)
            await whole(answer, script)

    run(scenario())


def test_losses_one_after_the_other(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi")
            for number, stage in enumerate(STAGES):
                request = await b.stages.request(number)
                share = (number + 1) / 5
                await script.play(request, share, share, share)
                await seen(b, script, request, (share, share, share))
                b.stages.restart(stage, f"{stage}'s next")
            last = await b.stages.request(3)
            assert last.request_id.endswith(".3")
            await script.play(last)
            await whole(answer, script)

    run(scenario())


def test_attempts_are_limited(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure, resume_attempts=2)) as b, b.client() as client:
            answer = client.chat("Hi")
            for number in range(3):
                request = await b.stages.request(number)
                await b.stages.fail(request.request_id, "token2wav", "stage_failed", f"trouble {number}")
            with pytest.raises(errors.StageFailedError, match="token2wav: trouble 2"):
                await answer.result()
            for request in b.stages.requests:
                await b.stages.aborted(request.request_id)
            assert len(b.stages.requests) == 3

    run(scenario())


def test_messages_out_of_sequence_cost_an_attempt_and_not_the_answer(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi")
            first = await b.stages.request(0)
            await script.play(first, 0.5, 0.5, 0.4)
            await b.stages.codec(first.request_id, 3, [1])
            await script.play(await b.stages.request(1))
            await whole(answer, script)

    run(scenario())


def test_only_a_request_that_was_begun_is_promised_room(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b, b.client() as client:
            script = Script(b)
            refused = client.chat("Hi")
            await b.stages.fail((await b.stages.request(0)).request_id, "talker", "busy", "full")
            with pytest.raises(errors.BusyError):
                await refused.result()
            answer = client.chat("Hi")
            first = await b.stages.request(1)
            await script.play(first, 0.5, 0.5, 0.4)
            await b.stages.fail(first.request_id, "talker", "stage_failed", "trouble")
            await b.stages.fail((await b.stages.request(2)).request_id, "talker", "busy", "full")
            await script.play(await b.stages.request(3))
            await whole(answer, script)

    run(scenario())


def test_errors_of_the_request_are_told_at_once(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b, b.client() as client:
            answer = client.chat("Hi")
            await b.stages.fail(
                (await b.stages.request(0)).request_id, "thinker", "media_invalid", "no sound"
            )
            with pytest.raises(errors.MediaError, match="no sound"):
                await answer.result()
            assert b.process.status().resumes == 0

    run(scenario())


async def lost_and_waiting(b: Bench, client: AsyncGatewayClient, **options: Any) -> Any:
    """A request that has lost its talker, and waits for another."""
    answer = client.chat("Hi", **options)
    request = await b.stages.request(0)
    await Script(b).play(request, 0.5, 0.5, 0.4)
    b.stages.alive.discard("talker")
    await b.stages.aborted_at(request.request_id, "thinker", "token2wav")
    assert len(b.stages.requests) == 1
    return answer


def test_a_client_that_cancels_while_its_request_waits(configure: Configure) -> None:
    async def scenario() -> None:
        async with (
            bench(recovering(configure, heartbeat_timeout_s=SOON_S, resume_wait_s=60.0)) as b,
            b.client() as client,
        ):
            answer = await lost_and_waiting(b, client)
            answer.cancel()
            with pytest.raises(errors.CancelledRequestError):
                await answer.result()
            b.stages.alive.add("talker")
            await until(lambda: b.process.status().ready)
            await b.stages.aborted(b.stages.requests[0].request_id)
            assert len(b.stages.requests) == 1

    run(scenario())


def test_a_deadline_that_passes_while_the_request_waits(configure: Configure) -> None:
    async def scenario() -> None:
        async with (
            bench(recovering(configure, heartbeat_timeout_s=SOON_S, resume_wait_s=60.0)) as b,
            b.client() as client,
        ):
            answer = await lost_and_waiting(b, client, deadline_s=1.0)
            with pytest.raises(errors.DeadlineError):
                await answer.result()

    run(scenario())


def test_patience_ends(configure: Configure) -> None:
    async def scenario() -> None:
        async with (
            bench(recovering(configure, heartbeat_timeout_s=SOON_S, resume_wait_s=0.3)) as b,
            b.client() as client,
        ):
            answer = await lost_and_waiting(b, client)
            with pytest.raises(errors.StageUnavailableError, match=r"no talker came back within 0\.3 s"):
                await answer.result()
            with pytest.raises(errors.StageUnavailableError, match="talker is down"):
                await client.chat("Hi").result()

    run(scenario())


def test_another_stage_is_lost_while_the_request_waits(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
            script = Script(b)
            answer = await lost_and_waiting(b, client)
            b.stages.alive.discard("thinker")
            await until(lambda: b.process.gateway.registry.state("thinker") == "down")
            b.stages.alive.add("talker")
            await until(lambda: b.process.gateway.registry.state("talker") == "ready")
            assert len(b.stages.requests) == 1
            b.stages.alive.add("thinker")
            await script.play(await b.stages.request(1))
            await whole(answer, script)
            assert b.process.status().resumes == 1

    run(scenario())


def test_requests_in_line_wait_for_a_lost_stage_too(configure: Configure) -> None:
    async def scenario() -> None:
        config = configure(
            {"heartbeat_timeout_s": 10.0, "resume_attempts": 3, "resume_wait_s": 10.0}, max_active=1
        )
        async with bench(config) as b, b.client() as client:
            script = Script(b)
            first, second = client.chat("Hi", seed=1), client.chat("Hi", seed=2)
            await b.stages.request(0)
            await until(lambda: b.counts["queued"] == 1)
            b.stages.restart("talker")
            await script.play(await b.stages.request(1))
            await whole(first, script)
            await script.play(await b.stages.request(2))
            await whole(second, script)
            assert [request.seed for request in b.stages.requests] == [1, 1, 2]

    run(scenario())


def test_a_frozen_stage_that_comes_back_is_used_again(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi")
            first = await b.stages.request(0)
            await script.play(first, 0.5, 0.5, 0.4)
            await seen(b, script, first, (0.5, 0.5, 0.4))
            frozen = b.stages.replica("talker")
            frozen.silent = True
            await until(lambda: is_lost(b, "talker"))
            assert (await client.status()).ready is False
            assert first.request_id not in frozen.aborts
            frozen.silent = False
            second = await b.stages.request(1)
            assert second.route is not None
            assert second.route.talker == "first"
            await until(lambda: first.request_id in frozen.aborts)
            await script.play(first)
            await script.play(second)
            await whole(answer, script)
            assert b.process.gateway.dropped_events > 0

    run(scenario())


def test_a_stage_that_has_left_this_gateway_holds_nothing_of_its_requests(configure: Configure) -> None:
    """It was deaf for so long that it took the gateway for dead, and joined it again."""

    async def scenario() -> None:
        async with bench(recovering(configure)) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi")
            first = await b.stages.request(0)
            await script.play(first, 0.5, 0.5, 0.4)
            replica = b.stages.replica("token2wav")
            left = replica.heartbeat()
            await replica.control.send_multipart(encode(msgspec.structs.replace(left, gateway=None)))
            await script.play(await b.stages.request(1))
            await whole(answer, script)

    run(scenario())


def test_the_stack_tells_the_truth_while_a_stage_is_lost(configure: Configure) -> None:
    async def scenario() -> None:
        config = configure(http_gateway(heartbeat_timeout_s=SOON_S, resume_attempts=3, resume_wait_s=10.0))
        async with http_bench(config) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi")
            first = await b.stages.request(0)
            await script.play(first, 0.5, 0.5, 0.4)
            b.stages.alive.discard("talker")
            await until(lambda: is_lost(b, "talker"))
            assert (await b.http.get("/readyz")).status_code == 503
            assert await b.metric('omnirelay_stage_replicas{stage="talker",state="down"}') == 1
            shown = (await b.http.get(f"/v1/requests/{first.request_id}")).json()
            assert shown["resumes"] == 1
            b.stages.alive.add("talker")
            await script.play(await b.stages.request(1))
            await whole(answer, script)
            assert (await b.http.get("/readyz")).status_code == 200
            assert (await client.status()).resumes == 1

    run(scenario())


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
    return set(replica.beat.peers) if replica is not None else set()


def routes(b: Bench, stage: StageName) -> list[str | None]:
    return [request.route.replica(stage) for request in b.stages.requests if request.route is not None]


def test_requests_go_where_the_least_work_is(configure: Configure) -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_requests_that_come_together_are_spread(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b, b.client() as client:
            await second_of_each(b)
            for number in range(8):
                client.chat("Hi", seed=number)
            await b.stages.request(7)
            for stage in STAGES:
                assert 3 <= routes(b, stage).count("first") <= 5

    run(scenario())


def test_only_those_who_know_each_other_serve_a_request(configure: Configure) -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_a_replica_where_a_request_failed_is_avoided(configure: Configure) -> None:
    """It has little to do, because it fails everything."""

    async def scenario() -> None:
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

    run(scenario())


def test_a_lost_replica_costs_only_its_own_requests_an_attempt(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
            await second_of_each(b)
            script = Script(b)
            answers = [client.chat("Hi", seed=number) for number in range(6)]
            await b.stages.request(5)
            lost = [
                each for each in b.stages.requests if each.route is not None and each.route.talker == "other"
            ]
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

    run(scenario())


def test_a_draining_stage_gets_nothing_new_and_ends_what_it_has(configure: Configure) -> None:
    async def scenario() -> None:
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

    run(scenario())


def test_what_a_drained_stage_has_not_ended_goes_on_elsewhere(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b, b.client() as client:
            script = Script(b)
            answer = client.chat("Hi")
            first = await b.stages.request(0)
            await script.play(first, 0.5, 0.5, 0.4)
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

    run(scenario())


def test_an_address_that_nobody_can_reach_is_refused(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b:

            def refused_more_than(before: int) -> bool:
                return b.process.status().refused.get("message_invalid", 0) > before

            for inbox in ("http://x:1", "tcp://h:0", "tcp://0.0.0.0:*", "tcp://a b:1", "tcp://*", "x"):
                before = b.process.status().refused.get("message_invalid", 0)
                b.stages.add("talker", f"to {inbox}", inbox)
                await until(partial(refused_more_than, before))
            assert b.process.gateway.registry.count("talker", "ready") == 1

    run(scenario())


def test_who_listens_everywhere_is_reached_where_it_comes_from(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b:
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

    run(scenario())


def test_a_gateway_that_ends_says_so_to_its_stages(configure: Configure) -> None:
    async def scenario() -> None:
        async with bench(recovering(configure)) as b:
            assert all(each.gateway == b.process.gateway.name for each in b.stages.replicas)
            await b.process.stop()
            await until(lambda: all(each.gateway is None for each in b.stages.replicas))

    run(scenario())

"""Stages that are lost while requests are with them: the clients see one unbroken answer."""

from typing import Any

import msgspec
import pytest

from omnirelay import AsyncClient, errors
from shared.messages import STAGES, StageLoad, StageName, ThinkRequest
from shared.transport.wire import encode
from tests.gateway.bench import Bench, Configure, bench
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import http_bench, http_gateway
from tests.gateway.recovering import (
    SOON_S,
    half_played,
    is_lost,
    recovering,
    seen,
)
from tests.gateway.scripted import CHUNKS, CODES, Script, whole

pytestmark = pytest.mark.usefixtures("no_pause")


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
    await until(lambda: b.process.gateway.registry.get(stage, "first") is None)
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


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loss", LOSSES)
async def test_an_answer_goes_on_where_it_was(
    configure: Configure, loss: str, stage: StageName, point: str
) -> None:
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
                len(second.resume.speech.chunk_samples) / len(CHUNKS),
            ]
            # Four samples each.
            assert set(second.resume.speech.chunk_samples) <= {len(CHUNKS[0]) // 4}
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


@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_an_answer_in_text_only_needs_the_thinker_alone(configure: Configure, share: float) -> None:
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


async def test_speech_that_is_over_is_not_asked_for_again(configure: Configure) -> None:
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


async def test_losses_one_after_the_other(configure: Configure) -> None:
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


async def test_attempts_are_limited(configure: Configure) -> None:
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


async def test_messages_out_of_sequence_cost_an_attempt_and_not_the_answer(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        script, answer, first = await half_played(b, client)
        await b.stages.codec(first.request_id, 3, [1])
        await script.play(await b.stages.request(1))
        await whole(answer, script)


async def test_a_request_waits_for_a_stage_that_is_full_also_after_it_has_begun(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        script = Script(b)
        answer = client.chat("Hi")
        await b.stages.fail((await b.stages.request(0)).request_id, "talker", "busy", "full")
        first = await b.stages.request(1)
        await script.play(first, 0.5, 0.5, 0.4)
        await b.stages.fail(first.request_id, "talker", "stage_failed", "trouble")
        await b.stages.fail((await b.stages.request(2)).request_id, "talker", "busy", "full")
        await script.play(await b.stages.request(3))
        await whole(answer, script)


async def test_a_stage_that_other_gateways_fill_is_waited_for(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        script = Script(b)
        talker = b.stages.replica("talker")
        talker.load = StageLoad(running=3, waiting=1)
        await until(lambda: b.process.status().stages[1].load.running == 3, "the gateway knows")
        answer = client.chat("Hi")
        for index in range(5):
            # More often than a request that failed is begun again.
            first = await b.stages.request(index)
            await b.stages.fail(first.request_id, "talker", "busy", "full")
        await script.play(await b.stages.request(5))
        await whole(answer, script)
        assert b.process.status().resumes == 0


async def test_errors_of_the_request_are_told_at_once(configure: Configure) -> None:
    async with bench(recovering(configure)) as b, b.client() as client:
        answer = client.chat("Hi")
        await b.stages.fail((await b.stages.request(0)).request_id, "thinker", "media_invalid", "no sound")
        with pytest.raises(errors.MediaError, match="no sound"):
            await answer.result()
        assert b.process.status().resumes == 0


async def lost_and_waiting(b: Bench, client: AsyncClient, **options: Any) -> Any:
    """A request that has lost its talker, and waits for another."""
    _, answer, request = await half_played(b, client, **options)
    b.stages.alive.discard("talker")
    await b.stages.aborted_at(request.request_id, "thinker", "token2wav")
    assert len(b.stages.requests) == 1
    return answer


async def test_a_client_that_cancels_while_its_request_waits(configure: Configure) -> None:
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


async def test_a_deadline_that_passes_while_the_request_waits(configure: Configure) -> None:
    async with (
        bench(recovering(configure, heartbeat_timeout_s=SOON_S, resume_wait_s=60.0)) as b,
        b.client() as client,
    ):
        answer = await lost_and_waiting(b, client, deadline_s=1.0)
        with pytest.raises(errors.DeadlineError):
            await answer.result()


async def test_patience_ends(configure: Configure) -> None:
    async with (
        bench(recovering(configure, heartbeat_timeout_s=SOON_S, resume_wait_s=0.3)) as b,
        b.client() as client,
    ):
        answer = await lost_and_waiting(b, client)
        with pytest.raises(errors.StageUnavailableError, match=r"no talker came back within 0\.3 s"):
            await answer.result()
        with pytest.raises(errors.StageUnavailableError, match="talker is down"):
            await client.chat("Hi").result()


async def test_another_stage_is_lost_while_the_request_waits(configure: Configure) -> None:
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


async def test_requests_in_line_wait_for_a_lost_stage_too(configure: Configure) -> None:
    async with bench(recovering(configure, {"max_active": 1})) as b, b.client() as client:
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


async def test_a_frozen_stage_that_comes_back_is_used_again(configure: Configure) -> None:
    async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
        script, answer, first = await half_played(b, client)
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


async def test_a_stage_that_has_left_this_gateway_holds_nothing_of_its_requests(configure: Configure) -> None:
    """It was deaf for so long that it took the gateway for dead, and joined it again."""

    async with bench(recovering(configure)) as b, b.client() as client:
        script, answer, _ = await half_played(b, client)
        replica = b.stages.replica("token2wav")
        left = replica.heartbeat()
        await replica.control.send_multipart(encode(msgspec.structs.replace(left, gateway=None)))
        await script.play(await b.stages.request(1))
        await whole(answer, script)


async def test_the_stack_tells_the_truth_while_a_stage_is_lost(configure: Configure) -> None:
    config = configure(http_gateway(heartbeat_timeout_s=SOON_S, resume_attempts=3, resume_wait_s=10.0))
    async with http_bench(config) as b, b.client() as client:
        script, answer, first = await half_played(b, client)
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

"""Stages that are lost while requests are with them: the clients see one unbroken answer."""

from typing import Any

import msgspec
import pytest

from omnirelay import AsyncClient, errors
from shared.messages import STAGES, StageLoad, StageName, ThinkRequest
from shared.transport.wire import encode
from tests.gateway.bench import Bench, Configure, bench, fails
from tests.gateway.fake_stages import until
from tests.gateway.scripted import (
    CHUNKS,
    CODES,
    RECOVERING,
    SOON_S,
    Script,
    half_played,
    is_lost,
    recovering,
    seen,
    whole,
)

pytestmark = pytest.mark.usefixtures("no_pause")
GATEWAY = RECOVERING


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
    await until(lambda: b.registry.get(stage, "first") is None)
    b.stages.add(stage, "second", b.stages.replica(stage).inbox)


async def breaks(b: Bench, stage: StageName, request: ThinkRequest) -> None:
    await b.stages.fail(request.request_id, stage, "queue_full", "no room")


async def is_cut_off(b: Bench, stage: StageName, request: ThinkRequest) -> None:
    b.stages.replica(stage).breaks = {"gateway": 1}


LOSSES = {
    "silent": goes_silent,
    "hung": hangs,
    "restarted": restarts,
    "left": leaves,
    "failed": breaks,
    "cut off": is_cut_off,
}
POINTS = {
    "nothing": (0.0, 0.0, 0.0),
    "middle": (0.5, 0.5, 0.4),
    "text": (1.0, 0.3, 0.2),
    "codes": (1.0, 1.0, 0.6),
    "speech first": (0.5, 1.0, 0.8),
}


# What goes on depends on the point alone, and not on what has ended the attempt.
CASES = [(loss, stage, "middle") for loss in LOSSES for stage in STAGES]
CASES += [("left", stage, point) for point in POINTS if point != "middle" for stage in STAGES]
CASES += [("failed", "thinker", "codes")]


@pytest.mark.parametrize(("loss", "stage", "point"), CASES)
async def test_an_answer_goes_on(configure: Configure, loss: str, stage: StageName, point: str) -> None:
    timeout_s = SOON_S if loss == "silent" else 10.0
    async with bench(recovering(configure, heartbeat_timeout_s=timeout_s)) as b, b.client() as client:
        script = Script(b)
        answer = client.chat("Hi", seed=3)
        first = await b.stages.request(0)
        await script.play(first, *POINTS[point])
        await seen(b, script, first, POINTS[point])
        await LOSSES[loss](b, stage, first)
        if stage == "thinker" and point == "codes" and loss != "failed":
            # The talker has spoken to the end: it needs no thinker any more.
            await script.play(first)
            await whole(answer, script)
            assert b.process.status().resumes == 0
            return
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
        lost = None if loss in ("hung", "failed", "cut off") else stage
        told = [each for each in b.stages.replicas if each.name == "first" and each.stage != lost]
        await until(lambda: all(first.request_id in each.aborts for each in told), "aborts")
        report = b.process.gateway.report(first.request_id)
        assert report is not None
        assert (report.state, report.resumes) == ("completed", 1)
        count = b.process.gateway.metrics.registry.get_sample_value(
            "omnirelay_request_resumes_total", {"stage": stage, "reason": loss}
        )
        assert count == b.process.status().resumes == 1


async def test_a_thinker_is_needed_until_something_comes_of_whole_codes(configure: Configure) -> None:
    """It passes them on; nothing else would say that it was lost before."""
    async with bench(recovering(configure)) as b, b.client() as client:
        script = Script(b)
        answer = client.chat("Hi", seed=3)
        first = await b.stages.request(0)
        await script.play(first, *POINTS["codes"])
        await seen(b, script, first, POINTS["codes"])
        await restarts(b, "token2wav", first)
        await restarts(b, "thinker", await b.stages.request(1))
        await script.play(await b.stages.request(2))
        await whole(answer, script)


@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_an_answer_in_text_only_needs_the_thinker_alone(configure: Configure, share: float) -> None:
    async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
        script = Script(b)
        answer = client.chat("Hi", speech=False)
        first = await b.stages.request(0)
        await script.play(first, share)
        await seen(b, script, first, (share, 0.0, 0.0))
        b.stages.alive -= {"talker", "token2wav"}
        await until(lambda: b.registry.state("talker") == "down")
        assert b.process.status().resumes == 0
        b.stages.restart("thinker")
        second = await b.stages.request(1)
        assert second.route is not None
        assert (second.route.thinker, second.route.talker, second.speech) == ("second", None, None)
        await script.play(second)
        await whole(answer, script, speech=False)


async def test_finished_speech_is_not_asked_for_again(
    tcp: Bench, client: AsyncClient, script: Script
) -> None:
    answer = client.chat("Hi")
    first = await tcp.stages.request(0)
    await script.play(first, text=0.5)
    await seen(tcp, script, first, (0.5, 1.0, 1.0))
    tcp.stages.alive -= {"talker", "token2wav"}
    tcp.stages.restart("thinker")
    second = await tcp.stages.request(1)
    assert second.speech is None
    assert second.resume is not None
    assert second.resume.speech is None
    await script.play(second)
    await whole(answer, script)


async def test_attempts_are_limited(configure: Configure) -> None:
    async with bench(recovering(configure, resume_attempts=2)) as b, b.client() as client:
        answer = client.chat("Hi")
        for number in range(3):
            request = await b.stages.request(number)
            await b.stages.fail(request.request_id, "token2wav", "stage_failed", f"trouble {number}")
        await fails(answer, errors.StageFailedError, "token2wav: trouble 2")
        for request in b.stages.requests:
            await b.stages.aborted(request.request_id)
        assert len(b.stages.requests) == 3


async def test_full_stages_are_waited_for(tcp: Bench, client: AsyncClient, script: Script) -> None:
    answer = client.chat("Hi")
    await tcp.stages.fail((await tcp.stages.request(0)).request_id, "talker", "busy", "full")
    first = await tcp.stages.request(1)
    await script.play(first, 0.5, 0.5, 0.4)
    await tcp.stages.fail(first.request_id, "talker", "stage_failed", "trouble")
    await tcp.stages.fail((await tcp.stages.request(2)).request_id, "talker", "busy", "full")
    await script.play(await tcp.stages.request(3))
    await whole(answer, script)


async def test_a_stage_full_of_others_is_waited_for(tcp: Bench, client: AsyncClient, script: Script) -> None:
    talker = tcp.stages.replica("talker")
    talker.load = StageLoad(running=3, waiting=1)
    await until(lambda: tcp.process.status().stages[1].load.running == 3, "the gateway knows")
    answer = client.chat("Hi")
    for index in range(5):
        # More often than a request that failed is begun again.
        first = await tcp.stages.request(index)
        await tcp.stages.fail(first.request_id, "talker", "busy", "full")
    await script.play(await tcp.stages.request(5))
    await whole(answer, script)
    assert tcp.process.status().resumes == 0


async def test_errors_of_the_request_are_told_at_once(tcp: Bench, client: AsyncClient) -> None:
    answer = client.chat("Hi")
    await tcp.stages.fail((await tcp.stages.request(0)).request_id, "thinker", "media_invalid", "no sound")
    await fails(answer, errors.MediaError, "no sound")
    assert tcp.process.status().resumes == 0


async def lost_and_waiting(b: Bench, client: AsyncClient, **options: Any) -> Any:
    """A request that has lost its talker, and waits for another."""
    _, answer, request = await half_played(b, client, **options)
    b.stages.alive.discard("talker")
    await b.stages.aborted_at(request.request_id, "thinker", "token2wav")
    assert len(b.stages.requests) == 1
    return answer


async def test_patience_ends(configure: Configure) -> None:
    async with (
        bench(recovering(configure, heartbeat_timeout_s=SOON_S, resume_wait_s=0.3)) as b,
        b.client() as client,
    ):
        answer = await lost_and_waiting(b, client)
        await fails(answer, errors.StageUnavailableError, r"no talker came back within 0\.3 s")
        await fails(client.chat("Hi"), errors.StageUnavailableError, "talker is down")


async def test_another_stage_is_lost_while_the_request_waits(configure: Configure) -> None:
    async with bench(recovering(configure, heartbeat_timeout_s=SOON_S)) as b, b.client() as client:
        script = Script(b)
        answer = await lost_and_waiting(b, client)
        b.stages.alive.discard("thinker")
        await until(lambda: b.registry.state("thinker") == "down")
        b.stages.alive.add("talker")
        await until(lambda: b.registry.state("talker") == "ready")
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


async def test_a_stage_that_joins_again_holds_no_requests(tcp: Bench, client: AsyncClient) -> None:
    """It was deaf for so long that it took the gateway for dead, and joined it again."""
    script, answer, _ = await half_played(tcp, client)
    replica = tcp.stages.replica("token2wav")
    left = replica.heartbeat()
    await replica.control.send_multipart(encode(msgspec.structs.replace(left, gateway=None)))
    await script.play(await tcp.stages.request(1))
    await whole(answer, script)

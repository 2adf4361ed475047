"""What the gateway tells of requests in their traces, over real sockets, with imitated stages."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omnirelay import GenerateRequest, errors
from shared.messages import ThinkRequest
from tests.gateway.bench import Bench, Configure, Log, Patch, bench, fails
from tests.gateway.http_bench import HI, HttpBench, http_bench, http_gateway
from tests.support.otlp import Collector, Span, Trace, wait_for_senders

TRACE, SPAN = "ab" * 16, "cd" * 8
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture(autouse=True)
def _soon_and_to_the_end(monkeypatch: Patch) -> Iterator[None]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    yield
    wait_for_senders()


@asynccontextmanager
async def traced(
    configure: Configure,
    answer: str | None = "yes",
    ratio: float = 1.0,
    gateway: dict[str, Any] | None = None,
    **how: Any,
) -> AsyncIterator[tuple[HttpBench, Collector]]:
    """A gateway that tells a collector of requests, and stages that give all of them the same answer."""
    with Collector() as collector:
        tracing = {"endpoint": collector.url, "sample_ratio": ratio}
        async with http_bench(configure(http_gateway(**gateway or {}), tracing=tracing, **how)) as b:
            if answer is not None:
                b.stages.serve(b.encode(answer))
            yield b, collector


async def trace_of(collector: Collector, request_id: str) -> Trace:
    return await asyncio.to_thread(collector.request, request_id)


async def root_with(collector: Collector, outcome: str) -> Span:
    """Wait for the only request that ended so."""

    def found(spans: list[Span]) -> list[Span]:
        return [span for span in spans if span.attributes.get("omnirelay.outcome") == outcome]

    (span,) = found(await asyncio.to_thread(collector.spans, lambda spans: bool(found(spans))))
    return span


async def test_a_request_from_its_begin_to_its_end(configure: Configure, caplog: Log) -> None:
    caplog.set_level("INFO")
    before = time.time_ns()
    async with traced(configure, "an answer") as (b, collector), b.client() as client:
        done = (await client.chat("A secret!", seed=7).result()).done
        trace = await trace_of(collector, done.request_id)
        root = trace.root
        (think,) = b.stages.requests
        assert (root.service, root.server, root.parent_id) == ("omnirelay-gateway", True, "")
        assert before <= root.begin < root.end <= time.time_ns()
        assert root.error is None
        length = len(b.encode("an answer"))
        assert root.attributes == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "omnirelay",
            "gen_ai.request.model": "checkpoint",
            "gen_ai.request.max_tokens": think.sampling.max_tokens,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.request.seed": 7,
            "gen_ai.output.type": "speech",
            "gen_ai.response.finish_reasons": ["stop", "length"],
            "gen_ai.usage.input_tokens": done.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": done.cached_prompt_tokens,
            "gen_ai.usage.output_tokens": length + 4,
            "omnirelay.request.id": done.request_id,
            "omnirelay.outcome": "completed",
            "omnirelay.text_tokens": length,
            "omnirelay.codec_tokens": 4,
            "omnirelay.audio_seconds": done.audio_seconds,
            "omnirelay.media_items": 0,
            "omnirelay.first_text_seconds": pytest.approx(
                (root.events["first_text"] - root.begin) / 1e9, abs=1e-4
            ),
            "omnirelay.first_audio_seconds": pytest.approx(
                (root.events["first_audio"] - root.begin) / 1e9, abs=1e-4
            ),
        }
        assert root.begin < root.events["first_text"] <= root.events["first_audio"] <= root.end
        assert root.end - root.begin == pytest.approx(done.state_seconds["completed"] * 1e9, abs=1e6)
        prepare, queue = trace.below(root)
        assert (prepare.name, queue.name) == ("prepare", "queue")
        assert (prepare.begin, prepare.end) == (root.begin, queue.begin)
        assert root.is_named(think.traceparent)
        assert f"request {done.request_id} (trace {root.trace_id}) completed after" in caplog.text
        assert "secret" not in repr(collector.spans())
        assert "answer" not in repr(collector.spans())


@pytest.mark.parametrize("path", ["chat/completions", "audio/speech"])
async def test_the_header_of_an_http_client_is_gone_on_from(configure: Configure, path: str) -> None:
    async with traced(configure) as (b, collector):
        body: dict[str, Any] = {"model": "omnirelay", "messages": HI}
        if path == "audio/speech":
            body = {"model": "omnirelay", "input": "Hi", "response_format": "wav"}
        answer = await b.http.post(f"/v1/{path}", json=body, headers={"Traceparent": PARENT})
        assert answer.status_code == 200
        root = (await trace_of(collector, answer.headers["X-Request-Id"])).root
        assert (root.trace_id, root.parent_id) == (TRACE, SPAN)


@pytest.mark.parametrize("headers", [[], ["nonsense"], ["0" * 20_000], [PARENT, PARENT]])
async def test_another_header_begins_a_trace(configure: Configure, headers: list[str]) -> None:
    async with traced(configure) as (b, collector):
        body = {"model": "omnirelay", "messages": HI}
        sent = [("traceparent", header) for header in headers]
        answer = await b.http.post("/v1/chat/completions", json=body, headers=sent)
        assert answer.status_code == 200
        root = (await trace_of(collector, answer.headers["X-Request-Id"])).root
        assert root.parent_id == ""
        assert root.trace_id not in {TRACE, "0" * 32}


async def test_a_tcp_client_says_it_in_the_request(configure: Configure) -> None:
    async with traced(configure) as (b, collector), b.client() as client:
        for given, trace_id in ((PARENT, TRACE), ("\N{SNOWMAN}" * 10_000, None)):
            done = (await client.chat("Hi", speech=False, traceparent=given).result()).done
            root = (await trace_of(collector, done.request_id)).root
            assert (root.trace_id == TRACE) is (trace_id is not None)
            assert root.attributes["gen_ai.output.type"] == "text"
            assert set(root.events) == {"first_text"}


async def test_requests_at_once_have_a_trace_each(configure: Configure) -> None:
    async with traced(configure) as (b, collector), b.client() as client:
        answers = await asyncio.gather(*(client.chat(f"Hi {n}").result() for n in range(12)))
        traces = [await trace_of(collector, answer.done.request_id) for answer in answers]
        assert len({trace.root.trace_id for trace in traces}) == 12
        asked = {each.request_id: each.traceparent for each in b.stages.requests}
        for answer, trace in zip(answers, traces, strict=True):
            assert trace.root.is_named(asked[answer.done.request_id])
            assert len(trace.spans) == 3


async def _fails_at_a_stage(b: Bench, request: ThinkRequest) -> None:
    await b.stages.fail(request.request_id, "talker", "unknown_speaker", "no voice 'a secret'")


async def _restarts_a_stage(b: Bench, request: ThinkRequest) -> None:
    b.stages.restart("talker")


@pytest.mark.parametrize(
    ("trouble", "outcome", "code", "told"),
    [
        (_fails_at_a_stage, "refused", "unknown_speaker", "no voice"),
        (_restarts_a_stage, "failed", "stage_unavailable", "restarted"),
    ],
)
async def test_errors_are_codes(
    configure: Configure, trouble: Any, outcome: str, code: str, told: str
) -> None:
    async with traced(configure, None) as (b, collector), b.client() as client:
        answer = client.chat("a secret")
        await trouble(b, await b.stages.request(0))
        await fails(answer, errors.RequestError, told)
        root = await root_with(collector, outcome)
        assert (root.error, root.attributes["error.type"]) == (code, code)
        assert "secret" not in repr(collector.spans())


async def test_a_request_that_is_begun_anew_is_one_trace(configure: Configure) -> None:
    async with (
        traced(configure, None, gateway={"resume_attempts": 1}) as (b, collector),
        b.client() as client,
    ):
        answer = client.chat("Hi")
        first = await b.stages.request(0)
        b.stages.restart("talker")
        second = await b.stages.request(1)
        assert (second.request_id, second.traceparent) == (f"{first.request_id}.1", first.traceparent)
        await b.stages.answer(second, b.encode("yes"))
        root = (await trace_of(collector, (await answer.result()).done.request_id)).root
        assert "resumed" in root.events
        assert (root.error, root.attributes["omnirelay.outcome"]) == (None, "completed")


async def test_requests_that_are_given_up(configure: Configure) -> None:
    async with traced(configure, None, max_active=1) as (b, collector), b.client() as client:
        cancelled = client.chat("Hi")
        await b.stages.request(0)
        waiting = client.chat("Hi", deadline_s=0.5)
        await fails(waiting, errors.DeadlineError)
        expired = await root_with(collector, "expired")
        assert expired.error == "deadline_exceeded"
        spans = Trace([each for each in collector.spans() if each.trace_id == expired.trace_id])
        assert [each.name for each in spans.below(expired)] == ["prepare", "queue"]
        cancelled.cancel()
        await fails(cancelled, errors.CancelledRequestError)
        root = await root_with(collector, "cancelled")
        assert root.error is None
        assert "error.type" not in root.attributes


async def test_a_request_that_is_not_taken(configure: Configure, caplog: Log) -> None:
    caplog.set_level("INFO")
    async with traced(configure) as (b, collector), b.client() as client:
        await fails(client.chat(GenerateRequest(traceparent=PARENT)), errors.EmptyPromptError)
        root = await root_with(collector, "refused")
        assert (root.trace_id, root.error) == (TRACE, "prompt_empty")
        assert "omnirelay.request.id" not in root.attributes
        assert f"refused a request (trace {TRACE}) of client" in caplog.text


async def test_only_the_share_that_is_wanted_is_told(configure: Configure) -> None:
    async with traced(configure, ratio=0.0) as (b, collector), b.client() as client:
        await client.chat("Hi").result()
        done = (await client.chat("Hi", traceparent=PARENT).result()).done
        await trace_of(collector, done.request_id)
        assert {span.trace_id for span in collector.spans()} == {TRACE}
        assert [request.traceparent is None for request in b.stages.requests] == [True, False]


async def test_without_an_endpoint_a_header_leads_nowhere(web: HttpBench) -> None:
    web.stages.serve(web.encode("yes"))
    body = {"model": "omnirelay", "messages": HI}
    answer = await web.http.post("/v1/chat/completions", json=body, headers={"traceparent": PARENT})
    assert answer.status_code == 200
    assert [request.traceparent for request in web.stages.requests] == [None]


async def test_what_ends_with_the_gateway_is_told_still(configure: Configure, monkeypatch: Patch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with Collector() as collector:
        async with bench(configure(tracing={"endpoint": collector.url})) as b, b.client() as client:
            client.chat("Hi")
            await b.stages.request(0)
        assert await root_with(collector, "cancelled")

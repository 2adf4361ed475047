"""Several answers to one request."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.bench import Configure
from tests.gateway.guarded import keys_file
from tests.gateway.http_bench import HI, MODEL, HttpBench, http_bench, http_gateway, speaking

ANSWER = "one two three"


async def requests_of(b: HttpBench, count: int) -> list[Any]:
    return [await b.stages.request(index) for index in range(count)]


async def answer_each(b: HttpBench, texts: list[str]) -> None:
    """A piece of each in turn."""
    asked = await requests_of(b, len(texts))
    pieces = [text.split(" ") for text in texts]
    for seq in range(max(map(len, pieces))):
        for request, words in zip(asked, pieces, strict=True):
            if seq < len(words):
                end: Any = "stop" if seq == len(words) - 1 else None
                await b.stages.text(request.request_id, seq, b.encode(f"{words[seq]} "), end)


async def test_choices_of_a_chat(web: HttpBench) -> None:
    texts = ["a b", "c", "d e f"]
    answering = asyncio.create_task(answer_each(web, texts))
    whole = await web.ai.chat.completions.create(model=MODEL, messages=HI, n=3, seed=2**32 - 1)
    await answering
    assert [choice.message.content for choice in whole.choices] == [f"{text} " for text in texts]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [each.seed for each in web.stages.requests] == [2**32 - 1, 0, 1]
    written = sum(len(web.encode(f"{word} ")) for text in texts for word in text.split())
    usage: Any = whole.usage
    assert usage.completion_tokens == written == usage.completion_tokens_details.text_tokens
    assert usage.prompt_tokens == len(web.stages.requests[0].prompt_token_ids)
    assert usage.total_tokens == usage.prompt_tokens + written
    assert whole.id == f"chatcmpl-{web.stages.requests[0].request_id}"
    drawn = asyncio.create_task(web.ai.chat.completions.create(model=MODEL, messages=HI, n=2))
    seeds = {(await web.stages.request(index)).seed for index in (3, 4)}
    assert len(seeds) == 2
    drawn.cancel()
    await asyncio.gather(drawn, return_exceptions=True)


async def test_choices_are_streamed_as_they_come(web: HttpBench) -> None:
    texts = ["a b c", "d e"]
    options: Any = {"include_usage": True}
    answering = asyncio.create_task(answer_each(web, texts))
    stream = await web.ai.chat.completions.create(
        model=MODEL, messages=HI, n=2, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    await answering
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    for at, text in enumerate(texts):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == at]
        assert own[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in own) == f"{text} "
        assert own[-1].finish_reason == "stop"
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    usage: Any = chunks[-1].usage
    assert usage.completion_tokens == sum(
        len(web.encode(f"{word} ")) for text in texts for word in text.split()
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_choices_of_a_completion(web: HttpBench, stream: bool) -> None:
    async with speaking(web, ANSWER, []):
        asked = {"model": MODEL, "prompt": "Once", "n": 2, "stream": stream}
        got = await web.http.post("/v1/completions", json=asked)
        assert got.status_code == 200
        if stream:
            lines = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
            choices = [each for line in lines for each in json.loads(line)["choices"]]
        else:
            choices = got.json()["choices"]
            assert got.json()["usage"]["completion_tokens"] == 2 * len(web.encode(ANSWER))
        for at in (0, 1):
            assert "".join(each["text"] for each in choices if each["index"] == at) == ANSWER


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_error_of_one_choice_ends_all(web: HttpBench, stream: bool) -> None:
    asking = asyncio.create_task(web.post(n=3, stream=stream))
    first, second, third = await requests_of(web, 3)
    for request in (first, second, third):
        await web.stages.text(request.request_id, 0, web.encode("a"))
    await web.stages.fail(second.request_id, "thinker", "prompt_too_long", "too long")
    got = await asking
    assert "prompt_too_long" in got.text
    assert got.status_code == (200 if stream else 400)
    await web.stages.aborted(first.request_id)
    await web.stages.aborted(third.request_id)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_cancels_all(web: HttpBench, stream: bool) -> None:
    asking = asyncio.create_task(web.post(n=2, stream=stream))
    for request in await requests_of(web, 2):
        await web.stages.text(request.request_id, 0, web.encode("a"))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    for request in web.stages.requests:
        await web.stages.aborted(request.request_id)


async def test_each_choice_counts_as_a_request(configure: Configure, tmp_path: Path) -> None:
    path = keys_file(tmp_path / "k", few={"key": "few", "max_requests": 2})

    async with http_bench(configure(http_gateway(api_keys=str(path)))) as b, speaking(b, ANSWER, []):
        b.http.headers["Authorization"] = "Bearer few"
        assert (await b.post(n=2)).status_code == 200
        refused: httpx.Response = await b.post(n=3)
        assert refused.status_code == 429
        # Nothing of it is left.
        assert (await b.post(n=2)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"n": 9}, "invalid_request", "n"),
        ({"n": 0}, "invalid_request", "n"),
        ({"n": 2, "modalities": ["text", "audio"]}, "unsupported", "n"),
        ({"n": 2, "stream": True, "resumable": True}, "unsupported", "n"),
        (
            {
                "n": 2,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
            "unsupported",
            "stream_options.continuous_usage_stats",
        ),
    ],
    ids=str,
)
async def test_choices_that_are_refused(
    web: HttpBench, fields: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await web.ai.chat.completions.create(model=MODEL, messages=HI, extra_body=fields)
    assert (raised.value.code, raised.value.param) == (code, param)

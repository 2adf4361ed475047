"""Several answers to one request, continued texts, and earlier spoken answers by the id of their audio."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gateway.http.openai.chat import MAX_SPOKEN_BYTES as MOST_BYTES
from gateway.http.openai.completions import read_completion
from gateway.http.openai.kept_answers import ENTRY_BYTES, KEPT_S, KeptAnswers
from gateway.http.openai.strings import parse
from omnirelay.errors import InvalidRequestError
from tests.gateway.bench import Configure, keys_file
from tests.gateway.http_bench import (
    HI,
    MODEL,
    HttpBench,
    cut,
    events_in,
    http_bench,
    http_gateway,
    melody,
    speaking,
)

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


def tokens_of(b: HttpBench, texts: list[str]) -> int:
    return sum(len(b.encode(f"{word} ")) for text in texts for word in text.split())


async def test_choices_of_a_chat(web: HttpBench) -> None:
    texts = ["a b", "c", "d e f"]
    answering = asyncio.create_task(answer_each(web, texts))
    whole = await web.ai.chat.completions.create(model=MODEL, messages=HI, n=3, seed=2**32 - 1)
    await answering
    assert [choice.message.content for choice in whole.choices] == [f"{text} " for text in texts]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert [each.seed for each in web.stages.requests] == [2**32 - 1, 0, 1]
    written = tokens_of(web, texts)
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
    assert usage.completion_tokens == tokens_of(web, texts)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_choices_of_a_completion(web: HttpBench, stream: bool) -> None:
    async with speaking(web, ANSWER, []):
        asked = {"model": MODEL, "prompt": "Once", "n": 2, "stream": stream}
        got = await web.http.post("/v1/completions", json=asked)
        assert got.status_code == 200
        if stream:
            choices = [each for chunk in events_in(got.text) for each in chunk["choices"]]
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


async def test_each_choice_counts_as_a_request(configure: Configure, tmp_path: Path) -> None:
    path = keys_file(tmp_path / "k", few={"key": "few", "max_requests": 2})

    async with http_bench(configure(http_gateway(api_keys=str(path)))) as b, speaking(b, ANSWER, []):
        b.http.headers["Authorization"] = "Bearer few"
        assert (await b.post(n=2)).status_code == 200
        refused: httpx.Response = await b.post(n=3)
        assert refused.status_code == 429
        # Nothing of it is left.
        assert (await b.post(n=2)).status_code == 200


CONTINUED = "upon a time"


async def test_a_text_is_continued(web: HttpBench) -> None:
    async with speaking(web, CONTINUED, []):
        create = web.ai.completions.create
        ids = web.encode("Once <|im")
        for prompt in ("Once <|im", ["Once <|im"], ids, [ids]):
            whole: Any = await create(model=MODEL, prompt=prompt)
            [choice] = whole.choices
            assert (choice.text, choice.finish_reason) == (CONTINUED, "stop")
            assert whole.usage.completion_tokens == len(web.encode(CONTINUED))
            assert web.stages.requests[-1].prompt_token_ids == ids
            assert web.stages.requests[-1].sampling.max_tokens == 16
        for most in ("max_tokens", "max_completion_tokens"):
            await web.http.post("/v1/completions", json={"model": MODEL, "prompt": "<|im_end|>", most: 5})
            assert len(web.stages.requests[-1].prompt_token_ids) > 1
            assert web.stages.requests[-1].sampling.max_tokens == 5
        options: Any = {"include_usage": True}
        # Its models do not know that only the last chunk has a finish reason, as in OpenAI's own streams.
        lenient = web.ai.with_options(_extra_kwargs={"_strict_response_validation": False})
        stream: Any = await lenient.completions.create(
            model=MODEL, prompt="Once", stream=True, stream_options=options
        )
        chunks: list[Any] = [chunk async for chunk in stream]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == CONTINUED
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == len(web.encode(CONTINUED))
        assert chunks[0].to_dict()["usage"] is None
        options["continuous_usage_stats"] = True
        stream = await lenient.completions.create(
            model=MODEL, prompt="Once", stream=True, stream_options=options
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream]
        assert counts[0] > 0
        assert counts[-1] == len(web.encode(CONTINUED))
        for wrong in ("", [10**6]):
            with pytest.raises(openai.BadRequestError) as raised:
                await create(model=MODEL, prompt=wrong)
            assert raised.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt[0]"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "mood": "good"}, "mood"),
        ({"prompt": "a", "stream": True, "resumable": True}, "resumable"),
    ],
    ids=str,
)
def test_refused_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read_completion(parse(bytearray(json.dumps({"model": "m", **fields}).encode()), 1000), 100)
    assert raised.value.param == param


SAID = "How are you? 😀"
CHUNKS = cut(melody(0.3), [4800])
QUESTION: Any = {"role": "user", "content": "Hi"}
SPOKEN: dict[str, Any] = {
    "model": "omnirelay",
    "modalities": ["text", "audio"],
    "audio": {"voice": "Ethan", "format": "pcm16"},
}


def spoken(audio_id: str) -> Any:
    return {"role": "assistant", "audio": {"id": audio_id}}


async def whole(b: HttpBench) -> tuple[str, int]:
    answer = await b.ai.chat.completions.create(messages=[QUESTION], **SPOKEN)
    audio = answer.choices[0].message.audio
    assert audio is not None
    assert answer.created <= audio.expires_at - KEPT_S <= time.time() + 1
    return audio.id, audio.expires_at


async def streamed(b: HttpBench) -> str:
    names = set()
    async for chunk in await b.ai.chat.completions.create(messages=[QUESTION], stream=True, **SPOKEN):
        if chunk.choices and (audio := getattr(chunk.choices[0].delta, "audio", None)):
            names.add(audio.id)
    (name,) = names
    return str(name)


async def test_an_answer_is_what_the_assistant_said(web: HttpBench) -> None:
    """The prompt is the same as with the answer's text."""

    async with speaking(web, SAID, CHUNKS):
        for name in ((await whole(web))[0], await streamed(web)):
            said: Any = {"role": "assistant", "content": SAID}
            for earlier in (spoken(name) | {"content": ""}, said):
                await web.ai.chat.completions.create(messages=[QUESTION, earlier, QUESTION], **SPOKEN)
            named, written = web.stages.requests[-2:]
            assert named.prompt_token_ids == written.prompt_token_ids


async def test_an_answer_that_is_not_kept_is_named(web: HttpBench) -> None:
    async with speaking(web, SAID, CHUNKS):
        for name in ("audio_1", "x" * 100_000):
            with pytest.raises(openai.BadRequestError) as caught:
                await web.ai.chat.completions.create(messages=[QUESTION, spoken(name), QUESTION], **SPOKEN)
            assert caught.value.param == "messages[1].audio"
            assert "send its transcript" in str(caught.value)


def test_an_answer_is_kept_for_its_client_and_its_time() -> None:
    now = 1000.0
    answers = KeptAnswers[str](MOST_BYTES, lambda: now)
    assert answers.keep("a", "audio_1", "Hello", len("Hello")) == 1000 + KEPT_S
    assert answers.get("a", "audio_1") == "Hello"
    assert answers.get("b", "audio_1") is None
    now += KEPT_S
    assert answers.get("a", "audio_1") is None
    answers.keep("b", "audio_2", "", len(""))
    assert list(answers._kept) == ["audio_2"]
    assert answers._quota.used == ENTRY_BYTES


def test_a_client_that_fills_the_room_loses_its_own_oldest_answers() -> None:
    answers = KeptAnswers[str](MOST_BYTES, lambda: 1000.0)
    answers.keep("other", "first", "kept", len("kept"))
    text = "x" * 9_488
    for number in range(1000):
        assert answers.keep("a", f"audio_{number}", text, len(text)) == 1000 + KEPT_S
    assert answers._quota.used <= MOST_BYTES
    assert answers.get("other", "first") == "kept"
    assert answers.get("a", "audio_0") is None
    assert answers.get("a", "audio_999") == text
    assert answers.keep("new", "theirs", "Hello", len("Hello")) == 1000 + KEPT_S


def test_an_answer_for_which_there_is_no_room_expires_at_once() -> None:
    answers = KeptAnswers[str](MOST_BYTES, lambda: 1000.0)
    answers.keep("a", "audio_1", "Hello", len("Hello"))
    assert answers.keep("a", "audio_2", "x" * MOST_BYTES, len("x" * MOST_BYTES)) == 1000
    assert answers.get("a", "audio_2") is None
    assert answers.get("a", "audio_1") == "Hello"
    # Nor does its client lose others where those of other clients leave none.
    answers._quota.take("others", MOST_BYTES // 8 * 7 + 1000)
    most = MOST_BYTES // 8 - ENTRY_BYTES
    assert answers.keep("a", "audio_3", "x", most) == 1000
    assert answers.get("a", "audio_1") == "Hello"

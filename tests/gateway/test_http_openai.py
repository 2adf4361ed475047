"""OpenAI's own client against the gateway: what it expects, it gets."""

import asyncio
import base64
from typing import Any

import openai
import pytest

from gateway.http.encoding.encoders import FORMATS, AudioFormat
from omnirelay.events import TokenLogprobs
from shared.messages import TextDelta
from tests.gateway.bench import Configure
from tests.gateway.http_bench import (
    HI,
    MODEL,
    HttpBench,
    decoded,
    events_in,
    from_base64,
    http_bench,
    http_gateway,
    likeness,
)
from tests.gateway.realtime import ANSWER, SAID

BOTH: Any = {"modalities": ["text", "audio"]}


async def chunks_of(b: HttpBench, **fields: Any) -> list[Any]:
    stream = await b.ai.chat.completions.create(model=MODEL, messages=HI, stream=True, **fields)
    return [chunk async for chunk in stream]


async def test_a_text_answer(web: HttpBench, answers: None) -> None:
    raw = await web.ai.chat.completions.with_raw_response.create(
        model=MODEL, messages=HI, temperature=0.5, seed=7, extra_body={"top_k": 5, "priority": 2}
    )
    answer: Any = raw.parse()
    request = web.stages.requests[0]
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 5)
    assert (request.seed, request.priority, request.speech) == (7, 2, None)
    assert answer.id == f"chatcmpl-{request.request_id}"
    assert raw.request_id == request.request_id
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", ANSWER)
    assert (choice.finish_reason, choice.message.audio) == ("stop", None)
    usage = answer.usage
    tokens = len(web.encode(ANSWER))
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(request.prompt_token_ids), tokens)
    assert usage.total_tokens == usage.prompt_tokens + tokens
    assert usage.prompt_tokens_details.cached_tokens == 3
    told = usage.completion_tokens_details
    assert (told.text_tokens, told.audio_tokens) == (tokens, 0)


async def test_a_text_answer_streamed(web: HttpBench) -> None:
    options: Any = {"model": "omnirelay", "stream": True, "stream_options": {"include_usage": True}}
    asking = asyncio.create_task(web.ai.chat.completions.create(messages=HI, **options))
    name = (await web.stages.request(0)).request_id
    for seq, word in enumerate(["How", " are"]):
        await web.stages.text(name, seq, web.encode(word))
    chunks = (await asking).__aiter__()
    head = await anext(chunks)
    assert head.choices[0].delta.role == "assistant"
    assert [(await anext(chunks)).choices[0].delta.content for _ in "12"] == ["How", " are"]
    # What follows is made only now: nothing waits for the end.
    await web.stages.text(name, 2, web.encode(" you?"), "length")
    rest = [chunk async for chunk in chunks]
    assert [chunk.choices[0].delta.content for chunk in rest[:-2]] == [" you?"]
    assert (rest[-2].choices[0].finish_reason, rest[-1].choices) == ("length", [])
    assert rest[-1].usage is not None
    assert rest[-1].usage.completion_tokens == len(web.encode("How are you?"))
    assert all(chunk.usage is None for chunk in (head, *rest[:-1]))
    assert {chunk.id for chunk in (head, *rest)} == {f"chatcmpl-{name}"}


async def test_a_spoken_answer_in_every_format(web: HttpBench, answers: None) -> None:
    for form in FORMATS:
        await whole(web, form)
        await streamed(web, form)


async def whole(b: HttpBench, form: AudioFormat) -> None:
    audio: Any = {"voice": "Ethan", "format": form}
    answer: Any = await b.ai.chat.completions.create(model=MODEL, messages=HI, audio=audio, **BOTH)
    speech = b.stages.requests[-1].speech
    assert speech is not None
    assert speech.speaker == "Ethan"
    message = answer.choices[0].message
    assert message.content is None
    assert message.audio.transcript == ANSWER
    assert message.audio.expires_at > answer.created
    check(base64.b64decode(message.audio.data, validate=True), form)
    assert answer.usage.completion_tokens_details.audio_tokens == 10


async def streamed(b: HttpBench, form: AudioFormat) -> None:
    chunks = await chunks_of(b, audio={"voice": "Ethan", "format": form}, **BOTH)
    deltas: list[dict[str, Any]] = [
        each.model_dump()["choices"][0]["delta"]["audio"] or {} for each in chunks
    ]
    name = f"audio_{b.stages.requests[-1].request_id}"
    assert {delta["id"] for delta in deltas if delta} == {name}
    assert "".join(delta.get("transcript") or "" for delta in deltas) == ANSWER
    pieces = [delta["data"] for delta in deltas if delta.get("data")]
    assert len(pieces) >= 3
    check(from_base64(pieces), form)
    assert [bool(delta.get("expires_at")) for delta in deltas[-3:]] == [False, True, False]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.choices[0].delta.content is None for chunk in chunks)


def check(data: bytes, form: str) -> None:
    shift, alike = likeness(decoded(data, form), SAID)
    assert alike > 0.98
    if form in {"wav", "flac", "pcm16"}:
        assert (shift, decoded(data, form).size) == (0, SAID.size)


async def test_speech_cut_short_is_told(web: HttpBench) -> None:
    web.stages.serve(web.encode("Hello"))
    answer = await web.ai.chat.completions.create(model=MODEL, messages=HI, **BOTH)
    # The text ended by itself, the speech of the imitated talker did not.
    assert answer.choices[0].finish_reason == "length"


async def test_text_to_speech(web: HttpBench, answers: None) -> None:
    for form in ("mp3", "opus", "aac", "flac", "wav", "pcm"):
        how: Any = {"model": MODEL, "input": "Hi", "voice": "Chelsie", "response_format": form}
        async with web.ai.audio.speech.with_streaming_response.create(**how) as response:
            pieces = [piece async for piece in response.iter_bytes()]
        assert response.headers["content-type"].startswith("audio/")
        assert len(pieces) >= 2
        check(b"".join(pieces), form)
    check((await web.ai.audio.speech.create(**how)).content, form)


async def test_text_to_speech_as_events(web: HttpBench, answers: None) -> None:
    async with web.ai.audio.speech.with_streaming_response.create(
        model=MODEL, input="Good morning", voice="Ethan", response_format="wav", stream_format="sse"
    ) as response:
        events = events_in(await response.text())
    assert {event["type"] for event in events[:-1]} == {"speech.audio.delta"}
    check(from_base64(event["audio"] for event in events[:-1]), "wav")
    assert events[-1]["type"] == "speech.audio.done"
    assert events[-1]["usage"]["output_tokens"] == 10 + len(web.encode("Good morning")) + 1


async def test_errors_are_the_clients_own_classes(configure: Configure) -> None:
    async with http_bench(configure(http_gateway(), max_active=1, max_queued=0)) as b:
        create = b.ai.chat.completions.create
        bad, few = openai.BadRequestError, {"min_tokens": 5}
        too_hot: Any = {"codec_sampling": {"temperature": 99}}
        schema = {"name": "long", "schema": {"enum": ["x" * 2**15] * 2}}
        json_object: Any = {"type": "json_object"}
        long_schema: Any = {"type": "json_schema", "json_schema": schema}
        wide: Any = {"properties": {str(number): {} for number in range(1000)}}
        wide_schema: Any = {"type": "json_schema", "json_schema": {"name": "wide", "schema": wide}}
        cases: list[Any] = [
            (openai.NotFoundError, "model_not_found", "model", {"model": "gpt-4o"}),
            (bad, "prompt_empty", "messages", {"messages": [{"role": "user", "content": " "}]}),
            (bad, "unknown_speaker", "audio.voice", {**BOTH, "audio": {"voice": "No"}}),
            (bad, "invalid_request", "codec_sampling.temperature", {"extra_body": too_hot, **BOTH}),
            (bad, "invalid_request", "codec_sampling.temperature", {"extra_body": too_hot}),
            (bad, "invalid_request", "min_tokens", {"max_tokens": 4, "extra_body": few}),
            (bad, "invalid_request", "min_tokens", {"response_format": json_object, "extra_body": few}),
            (bad, "invalid_request", "response_format", {"response_format": long_schema}),
            (bad, "invalid_request", "response_format", {"response_format": wide_schema}),
            (bad, "invalid_request", "deadline_s", {"extra_body": {"deadline_s": 0}}),
            (bad, "media_unreachable", "messages", with_picture("https://a.example/x.png")),
            (bad, "media_invalid", "messages", with_picture("data:image/png;base64,?")),
            (openai.APITimeoutError, None, None, {"timeout": 1.0}),
        ]
        for kind, code, param, fields in cases:
            given: Any = {"model": MODEL, "messages": HI, **fields}
            with pytest.raises(kind) as raised:
                await create(**given)
            if code is not None:
                assert (raised.value.code, raised.value.param) == (code, param)
        request = await b.stages.request(0)
        # The client that did not wait any longer cancelled its request.
        await b.stages.aborted(request.request_id)
        waiting = asyncio.create_task(create(model=MODEL, messages=HI))
        await b.stages.request(1)
        with pytest.raises(openai.RateLimitError) as busy:
            await create(model=MODEL, messages=HI)
        assert (busy.value.code, busy.value.type) == ("busy", "rate_limit_error")
        assert int(busy.value.response.headers["retry-after"]) >= 1
        assert int(busy.value.response.headers["retry-after-ms"]) >= 100
        failed = b.stages.requests[1]
        await b.stages.fail(failed.request_id, "thinker", "stage_failed", "it broke")
        with pytest.raises(openai.InternalServerError, match="it broke") as broken:
            await waiting
        assert broken.value.status_code == 500
        with pytest.raises(openai.InternalServerError, match=r"the deadline of 0\.05 s passed") as late:
            await create(model=MODEL, messages=HI, extra_body={"deadline_s": 0.05})
        assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


def with_picture(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": content}]}


async def test_a_stop_ends_the_answer_and_the_thinkers_work(web: HttpBench) -> None:
    for stream in (False, True):
        fields: Any = {"model": MODEL, "messages": HI, "stop": ["END", "\n\n"], "stream": stream}
        asking = asyncio.create_task(web.ai.chat.completions.create(**fields))
        request = await web.stages.request(len(web.stages.requests))
        for seq, piece in enumerate(["One", " two E", "N", "x EN", "D of it"]):
            await web.stages.text(request.request_id, seq, web.encode(piece))
        answer: Any = await asking
        if stream:
            chunks = [chunk.choices[0] async for chunk in answer]
            text = "".join(chunk.delta.content or "" for chunk in chunks)
            reason = chunks[-1].finish_reason
        else:
            [choice] = answer.choices
            text, reason = choice.message.content, choice.finish_reason
        assert (text, reason) == ("One two ENx ", "stop")
        await web.stages.aborted(request.request_id)
    assert web.counts["completed"] == 2
    with pytest.raises(openai.BadRequestError) as raised:
        await web.ai.chat.completions.create(model=MODEL, messages=HI, stop="END", **BOTH)
    assert (raised.value.code, raised.value.param) == ("unsupported", "stop")


async def test_log_probabilities(web: HttpBench) -> None:
    ids = web.encode("Hi 😀")
    (end,) = web.encode("<|im_end|>")
    for stream in (False, True):
        fields: Any = {"model": MODEL, "messages": HI, "logprobs": True, "top_logprobs": 3}
        asking = asyncio.create_task(web.ai.chat.completions.create(**fields, stream=stream))
        request = await web.stages.request(len(web.stages.requests))
        assert request.sampling.logprobs == 3
        for seq, token in enumerate(ids):
            delta = TextDelta(
                request_id=request.request_id,
                seq=seq,
                token_ids=[token],
                logprobs=[TokenLogprobs(-0.5, [(end, -0.125), (ids[0], -0.25), (token, -0.5)])],
                finish_reason="stop" if seq == len(ids) - 1 else None,
            )
            await web.stages.send(delta)
        answer: Any = await asking
        if stream:
            all_chunks = [chunk.choices[0] async for chunk in answer]
            content = [each for chunk in all_chunks if chunk.logprobs for each in chunk.logprobs.content]
        else:
            content = answer.choices[0].logprobs.content
        assert bytes(byte for each in content for byte in each.bytes).decode() == "Hi 😀"
        assert len(content) == len(ids)
        for each in content:
            assert each.logprob == -0.5
            assert [top.logprob for top in each.top_logprobs] == [-0.125, -0.25, -0.5]
            tops = [top.token for top in each.top_logprobs]
            assert tops[:2] == ["<|im_end|>", content[0].token]
    plain = asyncio.create_task(web.ai.chat.completions.create(model=MODEL, messages=HI))
    request = await web.stages.request(len(web.stages.requests))
    assert request.sampling.logprobs is None
    await web.stages.text(request.request_id, 0, ids, "stop")
    assert (await plain).choices[0].logprobs is None


async def test_each_chunk_counts_the_tokens_so_far(web: HttpBench, answers: None) -> None:
    """As guidellm asks for, always."""
    both = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await chunks_of(web, extra_body={"stream_options": both})
    last = chunks[-1].usage
    for chunk in chunks:
        assert chunk.usage.prompt_tokens == last.prompt_tokens
        assert chunk.usage.completion_tokens <= last.completion_tokens
        assert chunk.usage.total_tokens == last.prompt_tokens + chunk.usage.completion_tokens
    assert chunks[-2].usage.completion_tokens == last.completion_tokens
    alone = await chunks_of(web, extra_body={"stream_options": {"continuous_usage_stats": True}})
    assert [chunk.usage for chunk in alone] == [None] * len(alone)


async def test_chunks_with_speech_say_what_they_bring(web: HttpBench, answers: None) -> None:
    for chunk in await chunks_of(web, **BOTH):
        audio = getattr(chunk.choices[0].delta, "audio", None)
        assert chunk.modality == ("audio" if getattr(audio, "data", None) else "text")
    assert not any(hasattr(chunk, "modality") for chunk in await chunks_of(web))

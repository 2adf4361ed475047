"""/v1/responses: OpenAI's client, and its items as messages of a chat."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.openai.responses import read_response
from gateway.http.openai.strings import parse
from omnirelay.content import AudioPart, ChatMessage, ImagePart, TextPart
from omnirelay.errors import InvalidRequestError
from omnirelay.protocol import GenerateRequest
from tests.gateway.http_bench import MODEL, HttpBench, speaking
from tests.gateway.realtime import ANSWER
from tests.gateway.test_http_tools import WEATHER

FLAT: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def read(**fields: Any) -> GenerateRequest:
    body = bytearray(json.dumps({"model": "m", **fields}).encode())
    return read_response(parse(body, 10**6), 100, lambda _: None)[1]


async def test_a_response(web: HttpBench, answers: None) -> None:
    response: Any = await web.ai.responses.create(
        model=MODEL, input="Hi", instructions="Be kind.", max_output_tokens=9, store=False
    )
    assert (response.output_text, response.status, response.error) == (ANSWER, "completed", None)
    request = web.stages.requests[0]
    assert (request.sampling.max_tokens, request.speech) == (9, None)
    assert response.usage is not None
    assert response.usage.output_tokens == len(web.encode(ANSWER))
    assert response.id == f"resp_{request.request_id}"
    stream: Any = await web.ai.responses.create(model=MODEL, input="Hi", stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    last = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[-4:] == last
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == ANSWER
    assert events[-1].response.output_text == ANSWER


async def test_a_response_that_is_cut_says_so(web: HttpBench) -> None:
    asked = asyncio.create_task(web.ai.responses.create(model=MODEL, input="Hi", max_output_tokens=1))
    request = await web.stages.request(0)
    await web.stages.text(request.request_id, 0, web.encode("How"), "length")
    response: Any = await asked
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [each.status for each in response.output] == ["incomplete"]


async def test_a_response_repeats_what_was_asked(web: HttpBench, answers: None) -> None:
    first: Any = await web.ai.responses.create(model=MODEL, input="Hi")
    assert (first.tools, first.tool_choice, first.metadata, first.text.format.type) == (
        [],
        "auto",
        {},
        "text",
    )
    asked: Any = {
        "instructions": "Be kind.",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": first.id,
        "temperature": 0.5,
        "tool_choice": "none",
        "tools": [FLAT],
    }
    async with web.ai.responses.stream(model=MODEL, input="Why?", **asked) as stream:
        events: list[Any] = [event async for event in stream]
    for event in (events[0], events[-1]):
        assert event.response.to_dict().items() >= asked.items()
    asked = {"min_tokens": 9, "max_output_tokens": 8}
    refused = await web.http.post("/v1/responses", json={"model": MODEL, "input": "Hi", **asked})
    assert refused.json()["error"]["param"] == "min_tokens"
    long: Any = {"instructions": 70_000 * "b"}
    body = bytearray(json.dumps({"model": "m", "input": "Hi", **long}).encode())
    assert read_response(parse(body, 10**6), 100, lambda _: None)[0].shown.items() >= long.items()


async def test_a_response_continues_an_earlier_one(web: HttpBench, answers: None) -> None:
    """The prompt is the same as with the whole conversation, but for the instructions of before."""
    first: Any = await web.ai.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
    second: Any = await web.ai.responses.create(
        model=MODEL, input="And you?", previous_response_id=first.id, stream=True
    )
    last = [event async for event in second][-1].response
    await web.ai.responses.create(
        model=MODEL, input="Why?", previous_response_id=last.id, instructions="Be brief."
    )
    said: Any = {"role": "assistant", "content": ANSWER}
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        said,
        {"role": "user", "content": "And you?"},
        said,
        {"role": "user", "content": "Why?"},
    ]
    await web.ai.chat.completions.create(model=MODEL, messages=messages)
    assert web.stages.requests[2].prompt_token_ids == web.stages.requests[3].prompt_token_ids


async def test_what_was_not_to_be_kept_cannot_be_continued(web: HttpBench, answers: None) -> None:
    unkept: Any = await web.ai.responses.create(model=MODEL, input="Hi", store=False)
    for name in (unkept.id, "resp_1"):
        with pytest.raises(openai.BadRequestError) as raised:
            await web.ai.responses.create(model=MODEL, input="Hi", previous_response_id=name)
        assert raised.value.code == "previous_response_not_found"
        assert raised.value.param == "previous_response_id"


async def test_responses_over_a_websocket(web: HttpBench, answers: None) -> None:
    async with web.ai.responses.connect() as socket:
        create: Any = socket.response.create
        await create(model=MODEL, input="Hi", generate=False)
        warm = await until_completed(socket)
        assert (warm.output, web.stages.requests) == ([], [])
        await create(model=MODEL, input="Who are you?", previous_response_id=warm.id, store=False)
        first = await until_completed(socket)
        assert (first.output_text, first.store) == (ANSWER, False)
        await create(model=MODEL, input="Why?", previous_response_id=first.id)
        await create(model=MODEL, input="Why?", previous_response_id="resp_1")
        assert (await until_completed(socket)).output_text == ANSWER
        error: Any = await socket.recv()
        assert (error.type, error.code) == ("error", "previous_response_not_found")
        assert (error.status, error.error.param) == (400, "previous_response_id")
        await socket.send_raw('{"type": "session.update"}')
        assert (await socket.recv()).type == "error"
    users = [{"role": "user", "content": text} for text in ("Hi", "Who are you?", "Why?")]
    said = {"role": "assistant", "content": ANSWER}
    whole: Any = [users[0], users[1], said, users[2]]
    await web.ai.chat.completions.create(model=MODEL, messages=whole)
    assert web.stages.requests[1].prompt_token_ids == web.stages.requests[2].prompt_token_ids


async def half_answered(web: HttpBench, socket: Any) -> tuple[str, str]:
    """Ask, until there is a part of the answer; gives the ids of the request and of the response."""
    await socket.response.create(model=MODEL, input="Hi")
    request = await web.stages.request(0)
    await web.stages.text(request.request_id, 0, web.encode("How"))
    created: Any = await socket.recv()
    while (await socket.recv()).type != "response.output_text.delta":
        pass
    return request.request_id, created.response.id


async def test_a_response_over_a_websocket_is_cancelled(web: HttpBench) -> None:
    async with web.ai.responses.connect() as socket:
        create: Any = socket.response.create
        asked, response = await half_answered(web, socket)
        for name in ("resp_other", response):
            await socket.send_raw(json.dumps({"type": "response.cancel", "response_id": name}))
        while (event := await socket.recv()).type != "response.incomplete":
            assert event.type.startswith("response."), event
        assert (event.response.status, event.response.output_text) == ("cancelled", "How")
        await web.stages.aborted(asked)
        # So is one whose request is still read.
        await create(model=MODEL, input="Hi")
        await socket.send_raw(json.dumps({"type": "response.cancel"}))
        assert (await socket.recv()).type == "response.incomplete"
        # The connection goes on.
        web.stages.serve(web.encode("Hello"))
        await create(model=MODEL, input="Hi")
        assert (await until_completed(socket)).output_text == "Hello"


async def test_a_client_that_leaves_a_websocket_cancels_its_response(web: HttpBench) -> None:
    async with web.ai.responses.connect() as socket:
        create: Any = socket.response.create
        await create(model=MODEL, input="Hi")
        request = await web.stages.request(0)
    await web.stages.aborted(request.request_id)


async def test_a_gateway_that_stops_tells_a_websocket(web: HttpBench) -> None:
    """The client, which has cancelled nothing, is not told that it has."""
    async with web.ai.responses.connect() as socket:
        await half_answered(web, socket)
        web.process.gateway.close()
        error: Any = await socket.recv()
        assert (error.type, error.code, error.status) == ("error", "cancelled", 503)


async def test_a_call_that_was_dropped_is_not_continued(roomy: HttpBench) -> None:
    web = roomy
    asked: Any = {"model": MODEL, "tools": [FLAT], "parallel_tool_calls": False}
    async with speaking(web, f"{WEATHER}\n{WEATHER.replace('Ulm', 'Rom')}", []):
        first: Any = await web.ai.responses.create(input="Rain?", **asked)
        [call] = first.output
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "No."}
        await web.ai.responses.create(input=[output], previous_response_id=first.id, **asked)
        prompt = web.prompt_of(web.stages.requests[1])
        assert prompt.count("Ulm") == 1
        assert "Rom" not in prompt


async def until_completed(socket: Any) -> Any:
    while (event := await socket.recv()).type != "response.completed":
        assert event.type.startswith("response."), event
    return event.response


async def test_an_agents_calls(roomy: HttpBench) -> None:
    web = roomy
    async with speaking(web, f"Wait.\n{WEATHER}", []):
        first: Any = await web.ai.responses.create(model=MODEL, input="Rain?", tools=[FLAT])
        said, call = first.output
        assert (said.type, call.type) == ("message", "function_call")
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})
        stream: Any = await web.ai.responses.create(model=MODEL, input="Rain?", tools=[FLAT], stream=True)
        done = [event async for event in stream if event.type == "response.output_item.done"]
        assert [event.item.type for event in done] == ["message", "function_call"]
        items: Any = [
            {"role": "user", "content": "Rain?"},
            *(item.model_dump(exclude_none=True) for item in first.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "No."},
        ]
        again = await web.ai.responses.create(model=MODEL, input=items, tools=[FLAT])
        assert again.status == "completed"


def test_items_are_messages() -> None:
    request = read(
        instructions="Be kind.",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Look"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"},
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                ],
            },
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A cat"}]},
        ],
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "null"}, "strict": True}},
        reasoning={"effort": "low"},
        metadata={"a": "b"},
    )
    assert request.messages == [
        ChatMessage("system", "Be kind."),
        ChatMessage(
            "user",
            [
                TextPart("Look"),
                ImagePart(url="data:image/png;base64,AAAA"),
                AudioPart(url="data:;base64,AAAA"),
            ],
        ),
        ChatMessage("assistant", [TextPart("A cat")]),
    ]
    assert request.text_sampling.json_schema == '{"type":"null"}'
    assert not request.speech


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [5]}]}, "input[0].content[0]"),
        ({"input": "Hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "Hi", "background": True}, "background"),
        ({"input": "Hi", "mood": "good"}, "mood"),
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "Hi", "metadata": {"a": 513 * "b"}}, "metadata[...]"),
        ({"input": "Hi", "metadata": {"a": 70_000 * "b"}}, "metadata"),
        ({"input": [{"role": "bad", "content": "Hi"}], "instructions": "Be kind."}, "input[0].role"),
        (
            {"input": [{"type": "reasoning"}, {"role": "user", "content": [{"type": "text"}]}]},
            "input[1].content[0].text",
        ),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": "Hi", "text": {"format": {"type": "bad"}}}, "text.format.type"),
        ({"input": "Hi", "text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read(**fields)
    assert raised.value.param == param


PARTS = st.lists(
    JSON_VALUES | st.dictionaries(st.sampled_from(["type", "text", "image_url", "refusal"]), JSON_VALUES),
    max_size=3,
)


@given(
    st.dictionaries(
        st.sampled_from(["input", "tools", "tool_choice", "text", "instructions"]), JSON_VALUES, max_size=4
    ),
    st.lists(
        st.dictionaries(st.sampled_from(["type", "role", "content", "output", "name"]), JSON_VALUES)
        | st.fixed_dictionaries(
            {"type": st.sampled_from(["message", "function_call", "function_call_output"])}
        )
        | st.fixed_dictionaries({"role": st.just("user"), "content": PARTS}),
        max_size=3,
    ),
)
@settings(max_examples=100, deadline=None)
def test_anything_is_read_or_refused(fields: dict[str, Any], items: list[Any]) -> None:
    for given_fields in (fields, {**fields, "input": items}):
        with suppress(InvalidRequestError):
            read(**given_fields)

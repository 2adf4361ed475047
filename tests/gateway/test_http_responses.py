"""/v1/responses: OpenAI's client, and its items as messages of a chat."""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.openai.chat_request import read_chat
from gateway.http.openai.responses import as_chat
from omnirelay.content import AudioPart, ChatMessage, ImagePart, TextPart
from omnirelay.errors import InvalidRequestError
from omnirelay.protocol import GenerateRequest
from shared.config import Config
from tests.gateway.bench import run
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import MODEL, http_bench, http_gateway, speaking
from tests.gateway.test_http_fields import JSON_VALUES

ITEMS = ["message", "function_call", "function_call_output"]
Configure = Callable[..., Config]
ANSWER = "How are you? 😀"
FLAT: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


def read(**fields: Any) -> GenerateRequest:
    body = bytearray(json.dumps({"model": "m", **fields}).encode())
    return read_chat(body, 100, 10**6, as_chat)[1]


def test_a_response(configure: Configure) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b, speaking(b, ANSWER, []):
            response: Any = await b.ai.responses.create(
                model=MODEL, input="Hi", instructions="Be kind.", max_output_tokens=9, store=False
            )
            assert (response.output_text, response.status, response.error) == (ANSWER, "completed", None)
            request = b.stages.requests[0]
            assert (request.sampling.max_tokens, request.speech) == (9, None)
            assert response.usage is not None
            assert response.usage.output_tokens == len(b.encode(ANSWER))
            assert response.id == f"resp_{request.request_id}"
            stream: Any = await b.ai.responses.create(model=MODEL, input="Hi", stream=True)
            events: list[Any] = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type.removeprefix("response.") for event in events]
            assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
            last = ["output_text.done", "content_part.done", "output_item.done", "completed"]
            assert kinds[-4:] == last
            assert set(kinds[4:-4]) == {"output_text.delta"}
            assert "".join(event.delta for event in events[4:-4]) == ANSWER
            assert events[-1].response.output_text == ANSWER
            with pytest.raises(openai.BadRequestError) as raised:
                await b.ai.responses.create(model=MODEL, input="Hi", previous_response_id="resp_1")
            assert (raised.value.code, raised.value.param) == ("unsupported", "previous_response_id")

    run(scenario())


def test_an_agents_calls(configure: Configure) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b, speaking(b, f"Wait.\n{WEATHER}", []):
            b.stages.max_positions = 4096
            await until(lambda: b.process.gateway.registry.max_positions("thinker") == 4096)
            first: Any = await b.ai.responses.create(model=MODEL, input="Rain?", tools=[FLAT])
            said, call = first.output
            assert (said.type, call.type) == ("message", "function_call")
            assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Ulm"})
            stream: Any = await b.ai.responses.create(model=MODEL, input="Rain?", tools=[FLAT], stream=True)
            done = [event async for event in stream if event.type == "response.output_item.done"]
            assert [event.item.type for event in done] == ["message", "function_call"]
            items: Any = [
                {"role": "user", "content": "Rain?"},
                *(item.model_dump(exclude_none=True) for item in first.output),
                {"type": "function_call_output", "call_id": call.call_id, "output": "No."},
            ]
            again = await b.ai.responses.create(model=MODEL, input=items, tools=[FLAT])
            assert again.status == "completed"

    run(scenario())


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
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read(**fields)
    assert raised.value.param == param


@given(
    st.dictionaries(
        st.sampled_from(["input", "tools", "tool_choice", "text", "instructions"]), JSON_VALUES, max_size=4
    ),
    st.lists(
        st.dictionaries(st.sampled_from(["type", "role", "content", "output", "name"]), JSON_VALUES)
        | st.fixed_dictionaries(
            {"type": st.sampled_from(["message", "function_call", "function_call_output"])}
        ),
        max_size=3,
    ),
)
@settings(max_examples=100, deadline=None)
def test_anything_is_read_or_refused(fields: dict[str, Any], items: list[Any]) -> None:
    for given_fields in (fields, {**fields, "input": items}):
        with suppress(InvalidRequestError):
            read(**given_fields)

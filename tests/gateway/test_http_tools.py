"""Tools: what the model is told, and what becomes of its calls."""

import json
import re
from copy import deepcopy
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.input.tools import CallParser
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError, RequestError
from omnirelay.protocol import GenerateRequest
from omnirelay.tools import Call, Function, Tool, tool_result
from tests.gateway.bench import Configure
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HI, MODEL, http_bench, http_gateway, speaking
from tests.gateway.test_http_fields import CALL, TOOL, read

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
ULM = Call("weather", '{"city":"Ulm"}')


def parsed(text: str, size: int = 1, **how: Any) -> list[str | Call]:
    """An answer that arrives in pieces, its texts joined."""
    parser = CallParser(frozenset({"weather"}), **how)
    found = [each for at in range(0, len(text), size) for each in parser.push(text[at : at + size])]
    joined: list[str | Call] = []
    for each in [*found, *parser.push("", last=True)]:
        if isinstance(each, str) and joined and isinstance(joined[-1], str):
            joined[-1] += each
        else:
            joined.append(each)
    assert parser.calls == sum(isinstance(each, Call) for each in joined)
    return joined


def test_calls_are_found_wherever_an_answer_is_cut() -> None:
    text = f"See: {WEATHER} and {WEATHER}"
    for first in range(len(text)):
        for second in range(first, min(first + 90, len(text))):
            parser = CallParser(frozenset({"weather"}))
            found = [*parser.push(text[:first]), *parser.push(text[first:second])]
            found += parser.push(text[second:], last=True)
            assert [each for each in found if isinstance(each, Call)] == [ULM, ULM]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Hello there \n", ["Hello there \n"]),
        (WEATHER, [ULM]),
        (f"Let me see.\n{WEATHER}\n{WEATHER}\n", ["Let me see.", ULM, ULM]),
        (WEATHER.removesuffix("</tool_call>"), [ULM]),
        (WEATHER.replace("weather", "rockets"), [WEATHER.replace("weather", "rockets")]),
        ("<tool_call>{no JSON}</tool_call>", ["<tool_call>{no JSON}</tool_call>"]),
        ('<tool_call>{"name": ["weather"]}</tool_call>', ['<tool_call>{"name": ["weather"]}</tool_call>']),
        ("<tool_call>" + "[" * 10_000, ["<tool_call>" + "[" * 10_000]),
        ("a <tool_ b", ["a <tool_ b"]),
        ("a <tool_call", ["a <tool_call"]),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_calls_are_found_and_all_else_is_text(text: str, found: list[str | Call], size: int) -> None:
    if len(text) > 1000:
        size = max(size, 1000)
    assert parsed(text, size) == found


@given(st.lists(st.sampled_from([WEATHER, "<tool_call>", "</tool_call>", "{", "}", "a", " "]), max_size=8))
@settings(deadline=None)
def test_pieces_do_not_matter(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert parsed(text, 1) == parsed(text, 5) == parsed(text, 10**6)


def test_one_call_and_forced_calls() -> None:
    assert parsed(WEATHER * 2, several=False) == [ULM]
    assert parsed('{"name": "weather", "arguments": {"city": "Ulm"}}', bare=True) == [ULM]
    assert parsed('{"name": "weather", "argum', bare=True) == ['{"name": "weather", "argum']


def test_what_the_model_is_told() -> None:
    asked = [
        {"role": "system", "content": "Be kind."},
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "sun"}]},
    ]
    options, request = read(messages=asked, tools=[TOOL])
    system, _, called, results = request.messages
    assert isinstance(system.content, list)
    assert system.content[0] == TextPart("Be kind.")
    assert isinstance(system.content[1], TextPart)
    assert (
        '{"type":"function","function":{"name":"weather","parameters":{"type":"object"}}}'
        in system.content[1].text
    )
    call = WEATHER.replace(": ", ":").replace(", ", ",")
    assert called == ChatMessage("assistant", [TextPart(f"{call}\n{call}")])
    told = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert results == ChatMessage("user", told)
    assert (options.tools, options.bare) == (frozenset({"weather"}), False)
    unused, plain = read(tools=[TOOL], tool_choice="none"), read()
    assert unused == plain
    assert read(tools=[TOOL])[1].messages[0].role == "system"


def test_a_call_that_must_be_made_is_a_schema() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        options, request = read(tools=[TOOL], tool_choice=choice)
        schema = json.loads(request.text_sampling.json_schema or "")
        assert schema["properties"] == {"name": {"const": "weather"}, "arguments": {"type": "object"}}
        assert options.bare


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_an_object_streams_where_a_call_was_possible(size: int) -> None:
    assert parsed('{"name": "weather", "arguments": {"city": "Ulm"}}', size, bare=True) == [ULM]
    for text in ('{"city": "Ulm"}', '{"name": "Bob"}', '{"names": ["Bob"]}', "{}"):
        assert parsed(text, size, bare=True) == [text]
    parser = CallParser(frozenset({"weather"}), bare=True)
    assert [parser.push(each) for each in ('{"na', 'tion": ', '"x"')] == [[], ['{"nation": '], ['"x"']]


def test_a_call_or_an_object() -> None:
    """The schema allows both; the definitions of each are at the root, under names of their own."""
    place = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}},
        "additionalProperties": False,
    }
    tool: Any = deepcopy(TOOL)
    tool["function"]["parameters"] = {**place, "$defs": {"Place": {"type": "string"}}}
    form = {"type": "json_schema", "json_schema": {"schema": {**place, "$defs": {"Place": {"const": 1}}}}}
    options, request = read(tools=[tool], response_format=form)
    schema = json.loads(request.text_sampling.json_schema or "")
    for value, right in [
        ({"name": "weather", "arguments": {"at": "Ulm"}}, True),
        ({"at": 1}, True),
        ({"at": "Ulm"}, False),
        ({"name": "weather", "arguments": {"at": 1}}, False),
    ]:
        assert jsonschema.Draft202012Validator(schema).is_valid(value) is right
    assert options.bare
    forced, _ = read(tools=[tool], response_format=form, tool_choice="required")
    assert forced.bare
    unused = read(tools=[tool], response_format=form, tool_choice="none")
    assert unused == read(response_format=form)


async def test_openais_client_gets_calls(configure: Configure) -> None:
    answer = f"Let me see.\n{WEATHER}"
    async with http_bench(configure(http_gateway())) as b, speaking(b, answer, []):
        b.stages.max_positions = 4096
        await until(lambda: b.process.gateway.registry.max_positions("thinker") == 4096)
        fields: Any = {"model": MODEL, "messages": HI, "tools": [TOOL]}
        whole: Any = (await b.ai.chat.completions.create(**fields)).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Let me see.")
        [call] = whole.message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
        stream: Any = await b.ai.chat.completions.create(**fields, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
        [delta] = [each for chunk in chunks for each in chunk.delta.tool_calls or []]
        assert (delta.index, delta.function.name, delta.function.arguments) == (
            0,
            "weather",
            ULM.arguments,
        )
        assert delta.id
        assert chunks[-1].finish_reason == "tool_calls"
        again = [
            *HI,
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        await b.ai.chat.completions.create(**{**fields, "messages": again})


@pytest.mark.parametrize("size", [5000, 100_000])
def test_arguments_too_deep_to_be_read_stay_as_they_came(size: int) -> None:
    deep = "[" * size
    called = {**CALL, "function": {"name": "weather", "arguments": deep}}
    _, request = read(messages=[*HI, {"role": "assistant", "content": None, "tool_calls": [called]}])
    content = request.messages[1].content
    assert isinstance(content, list)
    [part] = content
    assert isinstance(part, TextPart)
    assert msgspec.json.encode(deep).decode() in part.text


async def test_the_clients_calls_are_those_of_http(configure: Configure) -> None:
    answer = f"Let me see.\n{WEATHER}"
    async with http_bench(configure(http_gateway())) as b, b.client() as client:
        b.stages.max_positions = 4096
        await until(lambda: b.process.gateway.registry.max_positions("thinker") == 4096)
        question = ChatMessage("user", "Hi")
        async with speaking(b, answer, []):
            result = await client.chat([question], speech=False, tools=[TOOL]).result()
            assert result.calls == [Call("weather", '{"city":"Ulm"}')]
            assert result.text == answer
            told = [question, ChatMessage("assistant", result.text), tool_result("rain", "no wind")]
            assert (
                await client.chat(told, speech=False, tools=[TOOL], tool_choice="none").result()
            ).calls == []
            assert (await b.post(tools=[TOOL])).status_code == 200
        bare = WEATHER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        async with speaking(b, bare, []):
            for choice in ("weather", "required"):
                forced = await client.chat(
                    [question], speech=False, tools=[TOOL], tool_choice=choice
                ).result()
                assert forced.calls == [ULM]
                # It can be told again as it is.
                assert forced.text == WEATHER
            chosen: Any = {"type": "function", "function": {"name": "weather"}}
            assert (await b.post(tools=[TOOL], tool_choice=chosen)).status_code == 200
        first, told_again, over_http, named, required, named_http = b.stages.requests
        assert first.prompt_token_ids == over_http.prompt_token_ids == required.prompt_token_ids
        assert first.sampling.json_schema is None
        schemas = [each.sampling.json_schema for each in (named, required, named_http)]
        assert json.loads(schemas[0] or "")["properties"]["name"] == {"const": "weather"}
        assert schemas == [schemas[0]] * 3
        said = b.process._prompts._tokenizer.decode(told_again.prompt_token_ids, skip_special_tokens=False)
        assert WEATHER in said
        assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nno wind\n</tool_response>" in said


async def test_a_call_survives_the_clients_connection(configure: Configure) -> None:
    async with http_bench(configure(http_gateway())) as b, b.client(reconnect_s=20) as client:
        b.stages.max_positions = 4096
        await until(lambda: b.process.gateway.registry.max_positions("thinker") == 4096)
        answer = client.chat("Hi", speech=False, tools=[TOOL])
        request, ids = await b.stages.request(0), b.encode(WEATHER)
        await b.stages.text(request.request_id, 0, ids[:5])
        await answer.__anext__()
        connection = client._connection
        assert connection is not None
        assert connection._writer is not None
        connection._writer.transport.abort()
        resumed = await b.stages.request(1)
        assert resumed.prompt_token_ids == request.prompt_token_ids
        await b.stages.text(resumed.request_id, 0, ids[5:], "stop")
        assert (await answer.result()).calls == [ULM]


async def test_tools_that_cannot_be_called_are_refused_over_tcp(configure: Configure) -> None:
    tool = {"type": "function", "function": {"name": "a b"}}
    long = {"type": "function", "function": {"name": "weather", "description": "x" * 2**22}}
    options: list[tuple[dict[str, Any], str]] = [
        ({"speech": True}, "answers in text only"),
        ({"tool_choice": "rockets"}, "among the tools"),
        ({"tools": [], "tool_choice": "required"}, "among the tools"),
        ({"tools": [tool]}, "tools[0]"),
        ({"tools": [TOOL] * 129}, "128"),
        ({"tools": [long]}, "besides media"),
    ]
    async with http_bench(configure(http_gateway())) as b, b.client() as client:
        for changed, words in options:
            with pytest.raises(RequestError, match=re.escape(words)):
                await client.chat("Hi", **{"speech": False, "tools": [TOOL], **changed}).result()
        request = GenerateRequest(prompt_text="Hi", speech=False, tools=[msgspec.convert(TOOL, Tool)])
        with pytest.raises(InvalidRequestError, match="described in messages"):
            await client.chat(request).result()
        # msgpack has values and keys that JSON has not.
        for schema in ({"default": msgspec.msgpack.Ext(5, b"x")}, {"default": {None: 1}}):
            for choice in ("auto", "required"):
                strange = Tool("function", Function("weather", parameters=schema))
                with pytest.raises(InvalidRequestError, match="written as JSON"):
                    await client.chat("Hi", speech=False, tools=[strange], tool_choice=choice).result()
        assert not b.stages.requests

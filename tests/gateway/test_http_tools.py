"""Tools and schemas: what the model is told, what becomes of its calls, and schemas that are too costly."""

import json
import re
from copy import deepcopy
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.input import json_schema
from gateway.input.json_schema import (
    MAX_DEPTH,
    MAX_EXPANDED,
    MAX_OBJECTS,
    MAX_PATTERN,
    MAX_PROPERTIES,
    require_feasible,
)
from gateway.input.tools import CallParser
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError, RequestError
from omnirelay.protocol import GenerateRequest
from omnirelay.tools import Call, Function, Tool, tool_result
from tests.gateway.bench import Patch, fails
from tests.gateway.http_bench import HI, MODEL, HttpBench, speaking
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
    assert options.calls == CallParser(frozenset({"weather"}))
    unused, plain = read(tools=[TOOL], tool_choice="none"), read()
    assert unused == plain
    assert read(tools=[TOOL])[1].messages[0].role == "system"


def test_a_call_that_must_be_made_is_a_schema() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        options, request = read(tools=[TOOL], tool_choice=choice)
        schema = json.loads(request.text_sampling.json_schema or "")
        assert schema["properties"] == {"name": {"const": "weather"}, "arguments": {"type": "object"}}
        assert options.calls.bare


TO_X = {"$ref": "#/$defs/X"}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        # Two groups of definitions, with equal names.
        (
            {
                "properties": {"a": TO_X, "b": {"$ref": "#/definitions/X"}},
                "$defs": {"X": {"type": "string"}},
                "definitions": {"X": {"type": "integer"}},
            },
            {"a": "x", "b": 1},
            {"a": 1, "b": "x"},
        ),
        # A tree, and a part that is no definition: "#" is the function's schema, not the call's.
        (
            {"properties": {"of": {"$ref": "#"}}},
            {"of": {"of": {}}},
            {"of": {"name": "weather", "arguments": {}}},
        ),
        (
            {"properties": {"name": {"type": "integer"}, "also": {"$ref": "#/properties/name"}}},
            {"name": 1, "also": 2},
            {"name": 1, "also": "weather"},
        ),
        # A value is none, but what a property has is one, whatever its name.
        (
            {"properties": {"a": {"const": TO_X}, "const": TO_X}, "$defs": {"X": {}}},
            {"a": TO_X, "const": 1},
            {"a": {"$ref": "#/$defs/function0/$defs/X"}},
        ),
    ],
)
def test_references_in_a_functions_schema_lead_where_they_led(
    fields: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    tool: Any = deepcopy(TOOL)
    tool["function"]["parameters"] = {"type": "object", "additionalProperties": False, **fields}
    _, request = read(tools=[tool], tool_choice="required")
    text = request.text_sampling.json_schema or ""
    require_feasible(text)
    schema = jsonschema.Draft202012Validator(json.loads(text))
    assert schema.is_valid({"name": "weather", "arguments": right})
    assert not schema.is_valid({"name": "weather", "arguments": wrong})


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_an_object_streams_where_a_call_was_possible(size: int) -> None:
    assert parsed('{"name": "weather", "arguments": {"city": "Ulm"}}', size, bare=True) == [ULM]
    for text in ('{"city": "Ulm"}', '{"name": "Bob"}', '{"names": ["Bob"]}', "{}"):
        assert parsed(text, size, bare=True) == [text]
    parser = CallParser(frozenset({"weather"}), bare=True)
    assert [parser.push(each) for each in ('{"na', 'tion": ', '"x"')] == [[], ['{"nation": '], ['"x"']]


def test_a_call_or_an_object() -> None:
    """The schema allows both; the definitions of each are at the root, under names of their own."""
    place = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "additionalProperties": False}
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
    assert options.calls.bare
    forced, _ = read(tools=[tool], response_format=form, tool_choice="required")
    assert forced.calls.bare
    unused = read(tools=[tool], response_format=form, tool_choice="none")
    assert unused == read(response_format=form)


async def test_openais_client_gets_calls(web: HttpBench, roomy: HttpBench) -> None:
    answer = f"Let me see.\n{WEATHER}"
    async with speaking(web, answer, []):
        fields: Any = {"model": MODEL, "messages": HI, "tools": [TOOL]}
        whole: Any = (await web.ai.chat.completions.create(**fields)).choices[0]
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Let me see.")
        [call] = whole.message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
        stream: Any = await web.ai.chat.completions.create(**fields, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
        [delta] = [each for chunk in chunks for each in chunk.delta.tool_calls or []]
        assert (delta.index, delta.function.name, delta.function.arguments) == (0, "weather", ULM.arguments)
        assert delta.id
        assert chunks[-1].finish_reason == "tool_calls"
        again = [
            *HI,
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rain"},
        ]
        await web.ai.chat.completions.create(**{**fields, "messages": again})


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


async def test_the_clients_calls_are_those_of_http(web: HttpBench, roomy: HttpBench) -> None:
    answer = f"Let me see.\n{WEATHER}"
    async with web.client() as client:
        question = ChatMessage("user", "Hi")
        async with speaking(web, answer, []):
            result = await client.chat([question], speech=False, tools=[TOOL]).result()
            assert (result.calls, result.text) == ([Call("weather", '{"city":"Ulm"}')], answer)
            told = [question, ChatMessage("assistant", result.text), tool_result("rain", "no wind")]
            assert (
                await client.chat(told, speech=False, tools=[TOOL], tool_choice="none").result()
            ).calls == []
            assert (await web.post(tools=[TOOL])).status_code == 200
        bare = WEATHER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
        async with speaking(web, bare, []):
            for choice in ("weather", "required"):
                forced = await client.chat(
                    [question], speech=False, tools=[TOOL], tool_choice=choice
                ).result()
                assert forced.calls == [ULM]
                # It can be told again as it is.
                assert forced.text == WEATHER
            chosen: Any = {"type": "function", "function": {"name": "weather"}}
            assert (await web.post(tools=[TOOL], tool_choice=chosen)).status_code == 200
        first, told_again, over_http, named, required, named_http = web.stages.requests
        assert first.prompt_token_ids == over_http.prompt_token_ids == required.prompt_token_ids
        assert first.sampling.json_schema is None
        schemas = [each.sampling.json_schema for each in (named, required, named_http)]
        assert json.loads(schemas[0] or "")["properties"]["name"] == {"const": "weather"}
        assert schemas == [schemas[0]] * 3
        said = web.prompt_of(told_again)
        assert WEATHER in said
        assert "<tool_response>\nrain\n</tool_response>\n<tool_response>\nno wind\n</tool_response>" in said


async def test_a_call_survives_the_clients_connection(web: HttpBench, roomy: HttpBench) -> None:
    async with web.client(reconnect_s=20) as client:
        answer = client.chat("Hi", speech=False, tools=[TOOL])
        request, ids = await web.stages.request(0), web.encode(WEATHER)
        await web.stages.text(request.request_id, 0, ids[:5])
        await answer.__anext__()
        connection = client._connection
        assert connection is not None
        assert connection._writer is not None
        connection._writer.transport.abort()
        resumed = await web.stages.request(1)
        assert resumed.prompt_token_ids == request.prompt_token_ids
        await web.stages.text(resumed.request_id, 0, ids[5:], "stop")
        assert (await answer.result()).calls == [ULM]


async def test_tools_that_cannot_be_called_are_refused_over_tcp(web: HttpBench) -> None:
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
    async with web.client() as client:
        for changed, words in options:
            with pytest.raises(RequestError, match=re.escape(words)):
                await client.chat("Hi", **{"speech": False, "tools": [TOOL], **changed}).result()
        request = GenerateRequest(prompt_text="Hi", speech=False, tools=[msgspec.convert(TOOL, Tool)])
        await fails(client.chat(request), InvalidRequestError, "described in messages")
        # msgpack has values and keys that JSON has not.
        for schema in ({"default": msgspec.msgpack.Ext(5, b"x")}, {"default": {None: 1}}):
            for choice in ("auto", "required"):
                strange = Tool("function", Function("weather", parameters=schema))
                await fails(
                    client.chat("Hi", speech=False, tools=[strange], tool_choice=choice),
                    InvalidRequestError,
                    "written as JSON",
                )
        assert not web.stages.requests


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(count)}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        properties(MAX_PROPERTIES),
        nested(MAX_DEPTH // 2 - 1),
        {"anyOf": [{"type": "integer"}] * (MAX_OBJECTS - 1)},
        {"type": "string", "pattern": "a" * MAX_PATTERN},
        {"enum": [f"v{number}" for number in range(5000)]},
        {"type": "string", "pattern": r"^(?:a|b)\(?=[(?=!]\\(?:x)$"},
        {"type": "string", "pattern": f"a{{{MAX_EXPANDED}}}"},
        {"type": "string", "pattern": r"[a{9999}]\{9999}{0}x{9999x)"},
        {"type": "string", "maxLength": 100_000},
        {"type": "object", "patternProperties": {"^a": {"type": "string"}}},
        {"properties": {"children": {"type": "array", "items": {"$ref": "#"}}}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"type": "integer"}}},
        {"properties": {"$ref": {"type": "string"}}},
        {"allOf": [{"type": "object"}], "type": "object", "title": "a", "description": "b", "default": {}},
        # A property of that name is not a regular expression, nor a list of properties.
        {"type": "object", "properties": {"pattern": {"type": "string"}, "properties": {"type": "object"}}},
    ],
)
def test_ordinary_schemas_are_taken(schema: Any) -> None:
    require_feasible(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (properties(MAX_PROPERTIES + 1), "257 properties"),
        ({"anyOf": [properties(MAX_PROPERTIES + 1)]}, "257 properties"),
        (nested(MAX_DEPTH // 2), "128 levels"),
        ({"anyOf": [{"type": "integer"}] * MAX_OBJECTS}, "2000 objects"),
        ({"items": {"pattern": "a" * (MAX_PATTERN + 1)}}, "1001 characters"),
        ({"pattern": "^a{1,50000}$"}, "more than 2000 characters"),
        ({"pattern": "a{9999999999999}"}, "more than 2000 characters"),
        ({"pattern": "a{ 1 , 00000000003000 }"}, "more than 2000 characters"),
        ({"pattern": "|".join(f"a{number}B{{1,900}}" for number in range(60))}, "more than 2000 characters"),
        ({"pattern": r"(?:(?:[^)]{10}\)){10}|a){20}"}, "more than 2000 characters"),
        ({"anyOf": [{"pattern": "a{900}"}] * 3}, "more than 2000 characters"),
        ({"patternProperties": {"((a{50}){9,})*{5}": True}}, "more than 2000 characters"),
        ({"patternProperties": {f"{number}{900 * '['}": True for number in range(60)}}, "without its ']'"),
        ({"patternProperties": {f"{number}{900 * 'a'}": True for number in range(60)}}, "more than 2000"),
        ({"pattern": "[a\\]"}, "without its ']'"),
        # A million values stopped the gateway for 0.6 s.
        ({"enum": [0] * 2**16}, "more than 65536"),
    ],
)
def test_schemas_that_take_minutes_to_compile_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        require_feasible(json.dumps(schema))
    assert error.value.param == "text_sampling.json_schema"


@pytest.mark.parametrize("pattern", ["x(?=y)", "(?!y)", "[(](?<=x)", r"\\(?<!x)", "[^]a](?=b)"])
@pytest.mark.parametrize("place", ["pattern", "patternProperties"])
def test_patterns_that_would_be_ignored_are_refused(pattern: str, place: str) -> None:
    value = pattern if place == "pattern" else {pattern: {"type": "string"}}
    with pytest.raises(InvalidRequestError, match="looks ahead or behind"):
        require_feasible(json.dumps({"items": {place: value}}))


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        *(
            ({"items": {keyword: {"type": "null"}}}, f"{keyword} in the schema")
            for keyword in json_schema.IGNORED
        ),
        ({"type": "object", "properties": {"a": {}}, "required": ["a", "b"]}, "requires 'b'"),
        ({"type": "object", "required": ["a"]}, "requires 'a'"),
        ({"allOf": [{"type": "object"}, {"required": ["a"]}]}, "allOf of several"),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {}}, "properties beside anyOf"),
        ({"oneOf": [{}], "allOf": [{}]}, "allOf beside oneOf"),
        ({"$ref": "#/$defs/a", "maxLength": 3, "$defs": {"a": {}}}, r"maxLength beside \$ref"),
    ],
)
def test_what_an_answer_would_not_obey_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        require_feasible(json.dumps(schema))
    # A function's, if no call has to obey it; a property's name; a value.
    require_feasible(json.dumps(schema), obeyed=False)
    require_feasible(json.dumps({"properties": schema.get("items", {}), "uniqueItems": False}))
    require_feasible(json.dumps({"default": schema}))


@pytest.mark.parametrize("text", ["{", "no", "[" * 65_000, '{"a":' * 10_000])
def test_what_is_not_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"not JSON|levels deep"):
        require_feasible(text)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"$ref": "https://example.com/a"}}}, "names no part"),
        ({"items": {"$ref": "#a"}, "$defs": {"b": {"$anchor": "a"}}}, "names no part"),
        ({"items": {"$ref": "#/$defs/a"}}, "names no part"),
        ({"items": {"$dynamicRef": "#a"}}, "not supported"),
        ({"$ref": "#"}, "leads to itself"),
        ({"items": {"$ref": "#/items"}}, "leads to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "leads to itself"),
    ],
)
def test_references_that_lead_nowhere_are_refused(schema: Any, problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        require_feasible(json.dumps(schema))


def test_each_of_many_references_is_followed_once(monkeypatch: Patch) -> None:
    """A chain of 1,990 of them stopped the gateway for 22 s."""
    followed: list[str] = []

    def follow(root: Any, pointer: str) -> Any:
        followed.append(pointer)
        return resolve(root, pointer)

    resolve = json_schema._resolve
    monkeypatch.setattr(json_schema, "_resolve", follow)
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(1800)}
    require_feasible(json.dumps({"$defs": {**chain, "a1800": {"type": "integer"}}}))
    assert len(followed) == len(set(followed)) == 1800

"""Schemas that would keep the thinker busy are refused, others are taken."""

import json
from typing import Any

import pytest

from gateway.input import json_schema
from gateway.input.json_schema import (
    MAX_DEPTH,
    MAX_EXPANDED,
    MAX_OBJECTS,
    MAX_PATTERN,
    MAX_PROPERTIES,
    require_feasible,
)
from omnirelay.errors import InvalidRequestError


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
        ({"pattern": "a{ 1 , 3000 }"}, "more than 2000 characters"),
        ({"pattern": "|".join(f"a{number}B{{1,900}}" for number in range(60))}, "more than 2000 characters"),
        ({"pattern": r"(?:(?:[^)]{10}\)){10}|a){20}"}, "more than 2000 characters"),
        ({"anyOf": [{"pattern": "a{900}"}] * 3}, "more than 2000 characters"),
        ({"patternProperties": {"((a{50}){9,})*{5}": True}}, "more than 2000 characters"),
        ({"patternProperties": {f"{number}{900 * '['}": True for number in range(9000)}}, "without its ']'"),
        ({"patternProperties": {f"{number}{900 * 'a'}": True for number in range(9000)}}, "more than 2000"),
        ({"pattern": "[a\\]"}, "without its ']'"),
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


def test_each_of_many_references_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of 1,990 of them stopped the gateway for 22 s."""
    followed: list[str] = []

    def follow(root: Any, pointer: str) -> Any:
        followed.append(pointer)
        return resolve(root, pointer)

    resolve = json_schema._resolve
    monkeypatch.setattr(json_schema, "_resolve", follow)
    chain = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(1990)}
    require_feasible(json.dumps({"$defs": {**chain, "a1990": {"type": "integer"}}}))
    assert len(followed) == len(set(followed)) == 1990

"""Refuses JSON schemas that the thinker would not compile in time, or whose keywords it would ignore.

With a vocabulary of 150,000 tokens, schemas within these bounds took at most 15 s; 1,500 optional properties
of one object, or 2,000 nested objects, took more than 60 s, in less than the 64 KiB that are allowed.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from omnirelay.errors import InvalidRequestError
from omnirelay.values import MAX_SCHEMA_CHARACTERS

MAX_PROPERTIES: Final = 256
"""Of one object: the time rises with the cube of the optional ones."""
MAX_DEPTH: Final = 128
"""Of nested objects and arrays of the schema's own text: the time rises with its cube."""
MAX_OBJECTS: Final = 2000
"""In the whole schema."""
MAX_PATTERN: Final = 1000
"""Characters of a regular expression."""
MAX_EXPANDED: Final = 2000
"""Characters and classes of all patterns with their counted repetitions written out.

The time rises with the square of a count: 0.2 s for ``a{1,2000}``, 3.4 s for ``a{1,9000}``, minutes for
``a{1,50000}``."""
ASSERTIONS: Final = frozenset({"(?=", "(?!", "(?<=", "(?<!"})
"""The grammar's compiler would ignore them, and write the pattern into the thinker's log."""
# What follows a "[" is read once, closed or not: many would take time that grows with their square.
_TOKENS: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*+(\]?)|\(\?<?[=!]|.", re.DOTALL)
_PARTS: Final = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\s*[0-9]+\s*(?:,[0-9\s]*)?\}|.", re.DOTALL)
IGNORED: Final = (
    "contains",
    "dependentRequired",
    "dependentSchemas",
    "if",
    "multipleOf",
    "not",
    "uniqueItems",
)
"""Keywords that the grammar's compiler would ignore."""
_DECIDING: Final = ("$ref", "anyOf", "oneOf", "allOf")
"""Beside one of them the compiler ignores the later ones, and all of :data:`_LIMITING`."""
_LIMITING: Final = re.compile(
    "(?:exclusive)?[mM](?:ax|in)imum|(?:max|min)(?:Items|Length|Properties)|(?:prefix|unevaluated)?[iI]tems|"
    "(?:additional|pattern|unevaluated)?[pP]roperties|const|enum|format|pattern|propertyNames|required"
)
_ROLES: Final = {
    **dict.fromkeys(("const", "default", "enum", "examples"), "value"),
    **dict.fromkeys(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"), "names"),
}
"""Keys of a schema that have no schema: a value, or schemas by name."""
FIELD: Final = "text_sampling.json_schema"


def require_feasible(schema: str, obeyed: bool = True) -> None:
    """Check a schema's text; InvalidRequestError if it is not JSON, or exceeds this module's bounds.

    Args:
        schema: The text.
        obeyed: An answer has to obey it, so that it may have no keyword that would be ignored.
    """
    if obeyed and len(schema) > MAX_SCHEMA_CHARACTERS:
        raise _invalid(f"the schema has {len(schema)} characters, more than {MAX_SCHEMA_CHARACTERS}")
    try:
        root = msgspec.json.decode(schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}", FIELD) from error
    objects = expanded = 0
    checked = set[str]()
    for each, depth, role in _containers(root):
        if depth > MAX_DEPTH:
            raise _invalid(f"the schema's objects and arrays are nested more than {MAX_DEPTH} levels deep")
        if not isinstance(each, dict):
            continue
        objects += 1
        if objects > MAX_OBJECTS:
            raise _invalid(f"the schema has more than {MAX_OBJECTS} objects")
        if role == "schema":
            _check_references(root, each, checked)
            _check_keywords(each, obeyed)
        for pattern in _patterns(each):
            expanded += _expanded(pattern)
            if expanded > MAX_EXPANDED:
                raise _invalid(
                    f"the patterns of the schema, their counted repetitions written out, have more than "
                    f"{MAX_EXPANDED} characters; maxLength has no such limit"
                )


def role_in(role: str, key: str) -> str:
    """What an object has at a key, by what it is: a ``schema``, schemas by ``names``, or a ``value``."""
    return {"schema": _ROLES.get(key, "schema"), "names": "schema"}.get(role, "value")


def _containers(root: Any) -> Iterator[tuple[dict[str, Any] | list[Any], int, str]]:
    """Every object and array of the schema, with its depth, and what it is."""
    waiting = [(root, 1, "schema")]
    while waiting:
        each, depth, role = waiting.pop()
        if isinstance(each, dict | list):
            yield each, depth, role
            found = each.items() if isinstance(each, dict) else (("", value) for value in each)
            waiting += [(value, depth + 1, role_in(role, key)) for key, value in found]


def _check_keywords(each: dict[str, Any], obeyed: bool) -> None:
    properties, required = each.get("properties", {}), each.get("required")
    if isinstance(properties, dict) and len(properties) > MAX_PROPERTIES:
        raise _invalid(
            f"an object of the schema has {len(properties)} properties, more than {MAX_PROPERTIES}"
        )
    if not obeyed:
        return
    for keyword in IGNORED:
        if each.get(keyword, False) is not False:
            raise _invalid(f"{keyword} in the schema is not supported")
    deciding = [keyword for keyword in _DECIDING if keyword in each]
    if deciding and (beside := [*deciding[1:], *filter(_LIMITING.fullmatch, each)]):
        raise _invalid(f"{beside[0]} beside {deciding[0]} in the schema is not supported")
    if isinstance(parts := each.get("allOf"), list) and len(parts) > 1:
        raise _invalid("allOf of several schemas is not supported")
    if isinstance(properties, dict) and isinstance(required, list):
        for name in required:
            if isinstance(name, str) and name not in properties:
                raise _invalid(f"the schema requires {name[:100]!r}, which its properties lack")


def _check_references(root: Any, each: dict[str, Any], checked: set[str]) -> None:
    """Check that the references of an object lead to another part of the schema; others mean "anything".

    Args:
        root: The schema.
        each: An object of it.
        checked: References that lead somewhere; gets more.
    """
    if "$dynamicRef" in each or "$recursiveRef" in each:
        raise _invalid("$dynamicRef and $recursiveRef are not supported: use $ref")
    met, target = set[str](), each
    while isinstance(target, dict) and isinstance(pointer := target.get("$ref"), str):
        if pointer in met:
            raise _invalid(f"$ref {pointer[:100]!r} of the schema leads to itself")
        if pointer in checked:
            break
        met.add(pointer)
        target = _resolve(root, pointer)
    checked |= met


def _resolve(root: Any, pointer: str) -> Any:
    """Return the part of a schema that a reference names."""
    name, *path = pointer.split("/")
    target = root if name == "#" else None
    for part in path:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, dict) else None
    if target is None:
        raise _invalid(f"$ref {pointer[:100]!r} names no part of the schema: write '#/$defs/NAME'")
    return target


def _patterns(each: dict[str, Any]) -> Iterator[str]:
    """The regular expressions of an object of the schema, each of which is checked."""
    properties = each.get("patternProperties")
    names = list(properties) if isinstance(properties, dict) else []
    patterns = [*names, each["pattern"]] if isinstance(each.get("pattern"), str) else names
    for pattern in patterns:
        if len(pattern) > MAX_PATTERN:
            raise _invalid(
                f"the schema has a pattern of {len(pattern)} characters, at most {MAX_PATTERN} are taken"
            )
        for token in _TOKENS.finditer(pattern):
            if token[0] in ASSERTIONS:
                raise _invalid("a pattern of the schema looks ahead or behind, which is not supported")
            if token[1] == "":
                raise _invalid("a pattern of the schema has a '[' without its ']'")
        yield pattern


def _expanded(pattern: str) -> int:
    """How many characters and classes a pattern has when its counted repetitions are written out."""
    open_groups, last = [0], 0
    for part in _PARTS.findall(pattern):
        if part == "(":
            open_groups.append(0)
        elif part == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            open_groups[-1] += last
        elif part[0] == "{" and len(part) > 1:
            times = max(1, *(int(bound[:9]) for bound in re.findall("0|[1-9][0-9]*", part)))
            open_groups[-1] += last * (times - 1)
            last *= times
        elif part not in "*+?":
            last = 1
            open_groups[-1] += 1
    return sum(open_groups)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{message}: simplify it", FIELD)

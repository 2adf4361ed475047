"""Put reference tables, made from the code, into pages of the site: ``python -m scripts.reference FOLDER``.

A line ``<!-- reference: NAME ARGUMENT -->`` of a page becomes what the function of this name returns.
The lines right below it say where a reader of the file finds the same; the site leaves them out.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
from msgspec import inspect as types
from pydantic import BaseModel

from gateway.http.errors import CODES, status_of
from gateway.http.fields import IGNORED, NEUTRAL
from gateway.http.openapi import describe
from gateway.http.realtime.turn_detection import TurnRules
from omnirelay import protocol
from omnirelay.cli.main import build_parser
from omnirelay.errors import BusyError, OmniRelayError, RequestError
from ops.config import value_kind
from shared.config import Config, StageConfig
from shared.docstrings import described_fields

ROOT: Final = Path(__file__).resolve().parents[1]
MARK: Final = re.compile(r"^<!-- reference: (\w+) ?(\S*) -->$(?:\n.+)*", re.MULTILINE)
METRICS: Final = {
    "Queues between processes": ("shared/transport",),
    "Every process": ("shared/metrics.py",),
    "Every stage": ("shared/stage", "shared/vllm"),
    "Thinker": ("services/thinker",),
    "Talker": ("services/talker",),
    "token2wav": ("services/token2wav",),
    "The gateway": ("gateway",),
}
"""Headings, and the code whose metrics stand under them."""
PLAIN: Final = {
    types.AnyType: "any value",
    types.BoolType: "boolean",
    types.FloatType: "number",
    types.IntType: "integer",
    types.MemoryViewType: "binary",
    types.BytesType: "binary",
    types.NoneType: "null",
    types.RawType: "map",
    types.StrType: "string",
}
SIDES: Final = {
    "client": [*get_args(protocol.ClientMessage), protocol.GenerateRequest],
    "gateway": get_args(protocol.ServerMessage),
    "turns": get_args(TurnRules),
}
BOUNDS: Final = {
    "min_length": "length ≥",
    "max_length": "length ≤",
    "ge": "≥",
    "gt": ">",
    "le": "≤",
    "lt": "<",
}


def table(*rows: tuple[str, ...]) -> str:
    """Lay out rows, the first with the names of the columns."""
    cells = [[re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in [cells[0], ["---"] * len(cells[0]), *cells[1:]]]
    return "\n".join(lines) + "\n"


def prose(text: str) -> str:
    """Turn a docstring's markup into Markdown; names of pages become links."""
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text)
    text = re.sub(r"\bdocs/(([\w-]+)\.md(?:#[\w-]+)?)", r"[\2](\1)", text)
    return re.sub(r"\s+", " ", text.replace("``", "`")).strip()


def summary(kind: type) -> str:
    """Return the first paragraphs of a class's docstring, before its attributes and arguments."""
    return prose(re.split(r"\n\s*(?:Attributes|Args):\n", kind.__doc__ or "")[0])


def keys(section: type[BaseModel] = Config, path: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield each key with its default, what it takes and what it means; ``STAGE`` stands for any stage."""
    schemas, said = section.model_json_schema()["properties"], described_fields(section)
    for name, field in section.model_fields.items():
        default, key = field.get_default(call_default_factory=True), f"{path}{name}"
        if isinstance(default, BaseModel):
            yield from keys(type(default), f"{key}.")
            continue
        if issubclass(section, StageConfig) and name in StageConfig.model_fields.keys() - {"inbox", "http"}:
            key = f"stages.STAGE.{name}"
        key = re.sub(r"^stages\.\w+\.engine\.", "stages.STAGE.engine.", key)
        key = re.sub(r"^cluster\.(thinker|talker|token2wav)\.", "cluster.STAGE.", key)
        shown = section.model_construct(**{name: default}).model_dump_json(include={name})
        yield key, shown.partition(":")[2][:-1], value_kind(schemas[name]), prose(said[name])


def configuration(prefix: str) -> str:
    """Return the keys of a section; without a prefix those at the top."""
    told = {key: row for key, *row in keys() if (key.startswith(prefix) if prefix else "." not in key)}
    rows = [(f"`{key}`", f"`{row[0]}`", row[1], row[2]) for key, row in told.items()]
    return table(("key", "default", "takes", "meaning"), *rows)


def metrics_in(place: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and help of the metrics that a module, or the modules of a folder, define."""
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call | ast.Tuple):
                continue
            given = node.args if isinstance(node, ast.Call) else node.elts
            callee = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            constants = [each.value for each in given[:2] if isinstance(each, ast.Constant)]
            texts = [value for value in constants if isinstance(value, str)]
            prefix = "" if callee not in ("self._counter", "self._histogram") else "omnirelay_"
            if len(texts) < 2 or not (prefix + texts[0]).startswith("omnirelay_"):
                continue
            name, kind = prefix + texts[0], "histogram" if "histogram" in callee.lower() else "gauge"
            if "counter" in callee.lower() or name.endswith("_total"):
                name, kind = f"{name.removesuffix('_total')}_total", "counter"
            yield name, kind, prose(texts[1])


def metrics(_argument: str) -> str:
    """Return all metrics, by process."""
    parts = []
    for heading, places in METRICS.items():
        rows = [(f"`{name}`", kind, said) for each in places for name, kind, said in metrics_in(ROOT / each)]
        parts.append(f"### {heading}\n\n{table(('metric', 'type', 'meaning'), *rows)}")
    return "\n".join(parts)


def family(base: type[OmniRelayError] = OmniRelayError) -> Iterator[type[OmniRelayError]]:
    """Yield an error's class and all below it."""
    yield base
    for child in base.__subclasses__():
        yield from family(child)


def status(kind: type[OmniRelayError]) -> str:
    """Return the HTTP status of an error that reaches clients, else an empty text."""
    if kind is not OmniRelayError and (kind is RequestError or not issubclass(kind, RequestError)):
        return ""
    return str(status_of(kind("", 1) if issubclass(kind, BusyError) else kind("")))


def errors(_argument: str) -> str:
    """Return all error codes, those with an HTTP status first."""
    rows = [(f"`{kind.code}`", f"`{kind.__name__}`", status(kind), summary(kind)) for kind in family()]
    rows += [
        (f"`{code}`", "", str(number), f"HTTP: {HTTPStatus(number).phrase}.")
        for number, code in CODES.items()
    ]
    rows.sort(key=lambda row: (row[2] or "999", row[0]))
    return table(("code", "class", "HTTP", "when"), *rows)


def value_type(kind: types.Type) -> str:
    """Say in words what a field of a message takes."""
    match kind:
        case types.UnionType():
            words = " or ".join(map(value_type, kind.types))
        case types.StructType():
            words = f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
        case types.LiteralType():
            words = ", ".join(f"`{each}`" for each in kind.values)
        case types.DictType():
            words = f"map of {value_type(kind.key_type)} to {value_type(kind.value_type)}"
        case types.TupleType():
            words = f"array of {', '.join(map(value_type, kind.item_types))}"
        case types.CollectionType():
            words = f"array of {value_type(kind.item_type)}"
        case _:
            words = PLAIN[type(kind)]
    return words + _bounds(kind)


def _bounds(kind: Any) -> str:
    told = [
        f"{sign} {getattr(kind, name):,}"
        for name, sign in BOUNDS.items()
        if getattr(kind, name, None) is not None
    ]
    return f" ({', '.join(told)})" if told else ""


def structs_of(kind: types.Type) -> Iterator[types.StructType]:
    """Yield the structs that a type is made of, itself included, the outermost first."""
    if isinstance(kind, types.StructType):
        yield kind
        parts = [field.type for field in kind.fields]
    else:
        names = ("type", "types", "item_type", "item_types", "key_type", "value_type")
        found = [getattr(kind, name, ()) for name in names]
        parts = [part for each in found for part in (each if isinstance(each, tuple) else [each])]
    for part in parts:
        yield from structs_of(part)


def messages(side: str) -> str:
    """Return the messages of a side, and the structs in them; a side is one of ``SIDES``."""
    parts = []
    listed = [each for kind in SIDES[side] for each in structs_of(types.type_info(kind))]
    for struct in {each.cls: each for each in listed}.values():
        name, said = struct.cls.__name__, described_fields(struct.cls)
        parts.append(f"### {name}\n\n{summary(struct.cls)}\n")
        if struct.tag:
            parts.append(f"`{struct.tag_field}` is `{struct.tag}`.\n")
        rows = [
            (f"`{each.encode_name}`", value_type(each.type), _default(each), prose(said.get(each.name, "")))
            for each in struct.fields
        ]
        if rows:
            parts.append(table(("field", "type", "default", "meaning"), *rows))
    return "\n".join(parts)


def fields(name: str) -> str:
    """Return the fields of a body of HTTP, by its name in the gateway's OpenAPI document."""
    schema = describe(())["components"]["schemas"][name]
    rows = [
        (
            f"`{field}`",
            value_kind(each).replace("section", "object").replace("or or", "or"),
            "needed" if field in schema["required"] else _shown(each.get("default")),
            prose(each.get("description", "")),
        )
        for field, each in schema["properties"].items()
    ]
    return table(("field", "takes", "default", "meaning"), *rows)


def foreign_fields(_argument: str) -> str:
    """Return the fields of other servers' APIs that HTTP accepts, and what happens to them."""
    refused = [
        (f"`{name}`", f"Refused, unless {' or '.join(['null', *map(_shown, values)])}.")
        for name, values in NEUTRAL.items()
    ]
    return table(
        ("field", "what happens"), *[(f"`{name}`", "Ignored.") for name in sorted(IGNORED)], *refused
    )


def _shown(value: Any) -> str:
    return "" if value in (None, {}) else f"`{json.dumps(value)}`"


def _default(field: types.Field) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()}`"
    if isinstance(field.default, msgspec.Struct):
        return "its defaults"
    if field.default is msgspec.NODEFAULT:
        return ""
    return "null" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`"


def commands(_argument: str) -> str:
    """Return the usage and the options of every command."""
    return "\n".join(
        f"### {parser.prog.removeprefix('omnirelay ')}\n\n```text\n{parser.format_help()}```\n"
        for parser in parsers(build_parser())
    )


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, not those with subcommands."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for each in action.choices.values():
            yield from parsers(each)


TABLES: Final = {
    each.__name__: each
    for each in (configuration, metrics, errors, messages, fields, foreign_fields, commands)
}


def fill(text: str) -> str:
    """Replace a page's marks, with the lines right below them, by the tables that they name."""
    return MARK.sub(lambda mark: TABLES[mark[1]](mark[2]), text)


if __name__ == "__main__":
    for page in Path(sys.argv[1]).glob("docs/*.md"):
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")

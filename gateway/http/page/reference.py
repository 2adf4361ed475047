"""The page of the API: a document of OpenAPI as HTML, without a script."""

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

BOUNDS: Final = {
    "minimum": "from",
    "exclusiveMinimum": "over",
    "maximum": "to",
    "exclusiveMaximum": "under",
    "minLength": "from",
    "maxLength": "to",
}
"""Words for what bounds a number, or the length of a text."""
HEAD: Final = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>The HTTP API of OmniRelay</title>
  <link rel="icon" href="/page/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/page/style.css">
</head>
<body>
<main class="reference words">
<h1>The HTTP API of OmniRelay {version}</h1>
<p>The same as <a href="/openapi.json">openapi.json</a>. Errors are <a href="#Error">Error</a>.</p>
"""


def as_page(document: Mapping[str, Any]) -> str:
    """Write each operation, and each schema with its fields."""
    parts = [HEAD.format(version=escape(document["info"]["version"]))]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            bodies = operation.get("requestBody", {}).get("content", {})
            takes = ", ".join(f"{_kind(each['schema'])} ({escape(media)})" for media, each in bodies.items())
            answers = "; ".join(
                f"{status} {escape(', '.join(answer.get('content', {})))}"
                for status, answer in operation["responses"].items()
                if status != "default"
            )
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}.</p>"
                f"<ul>{f'<li>Takes: {takes}</li>' if takes else ''}<li>Answers: {answers}</li></ul>"
            )
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h2 id="{name}">{name}</h2><p>{escape(schema.get("description", ""))}</p>')
        needed = dict.fromkeys(schema["required"], "needed")
        rows = [
            f"<tr><td><code>{escape(field)}</code></td><td>{_kind(value)}</td>"
            f"<td>{needed.get(field) or _default(value)}</td>"
            f"<td>{escape(value.get('description', ''))}</td></tr>"
            for field, value in schema["properties"].items()
        ]
        head = "".join(f"<th>{each}</th>" for each in ("field", "value", "default", "meaning"))
        parts.append(f"<table><tr>{head}</tr>{''.join(rows)}</table>")
    return "".join([*parts, "</main></body></html>"])


def _kind(schema: Mapping[str, Any]) -> str:
    """Say what a value is."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(each))}</code>" for each in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"array of {_kind(schema.get('items', {}))}"
    words = kind if isinstance(kind, str) else " or ".join(kind)
    bounds = " ".join(f"{word} {schema[name]}" for name, word in BOUNDS.items() if name in schema)
    return f"{words} ({bounds})" if bounds else words


def _default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    return "" if value is None else f"<code>{escape(json.dumps(value))}</code>"

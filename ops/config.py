"""``omnirelay config``: show the configuration that applies, or one with every key to begin with."""

import argparse
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import yaml

from omnirelay.cli.output import say
from shared.config import Config, check_values, read_values
from shared.config.values import Section
from shared.docstrings import described_fields

HEAD: Final = """\
# The configuration of OmniRelay with every key and its default, as `omnirelay config init` prints it.
# Keep what you change: missing keys have their defaults.  docs/configuration.md tells where to begin.

"""
BOUNDS: Final = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
"""Signs of the bounds in a JSON schema."""
COMMENT_WIDTH: Final = 100
KeyPath = tuple[str, ...]


def show(arguments: argparse.Namespace) -> int:
    """Print every value that applies, and whether the file, the environment or neither sets it.

    Raises:
        ConfigError: The configuration cannot be read, or is not valid.
    """
    file, environment = read_values(arguments.config, {}), read_values()
    config = check_values(read_values(arguments.config), str(arguments.config or "the configuration"))

    def source(path: KeyPath, _schema: Mapping[str, Any]) -> str:
        if _sets(environment, path):
            return "environment"
        return "file" if _sets(file, path) else "default"

    say("\n".join(_lines(config, source)))
    return 0


def init(_arguments: argparse.Namespace) -> int:
    """Print a configuration with every key, its default, and what it takes."""
    say(example(), end="")
    return 0


def example() -> str:
    """Return a configuration of all defaults, with comments from the models."""
    return HEAD + "\n".join(_lines(Config(), lambda _path, schema: value_kind(schema), told=set())) + "\n"


def _lines(
    section: Section,
    note: Callable[[KeyPath, Mapping[str, Any]], str],
    path: KeyPath = (),
    told: set[str] | None = None,
) -> Iterator[str]:
    """Yield the YAML of a section, a note behind each value; ``told``: with the docstrings that it lacks."""
    indent, values = "  " * len(path), section.model_dump(mode="json")
    schemas = type(section).model_json_schema()["properties"]
    fields = described_fields(type(section))
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            if told is not None:
                about = (type(value).__doc__ or "").partition("\n")[0].replace("``", "`")
                yield f"\n{indent}# {about}"
            yield f"{indent}{name}:"
            yield from _lines(value, note, (*path, name), told)
        else:
            if told is not None and fields[name] not in told:
                told.add(fields[name])
                comment = textwrap.wrap(fields[name], COMMENT_WIDTH, break_on_hyphens=False)
                yield textwrap.indent("\n".join(comment), f"{indent}# ")
            yield f"{indent}{name}: {_flow(values[name])}  # {note((*path, name), schemas[name])}"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=2**20, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")


def value_kind(schema: Mapping[str, Any]) -> str:
    """Say in words what a JSON schema takes."""
    if "anyOf" in schema:
        return " or ".join(map(value_kind, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(schema["enum"])
    bounds = " and".join(f" {sign} {schema[name]}" for name, sign in BOUNDS.items() if name in schema)
    most = f" of at most {schema['maxItems']}" if "maxItems" in schema else ""
    return f"{schema.get('type', 'section')}{bounds}{most}"


def _sets(values: Any, path: KeyPath) -> bool:
    """Whether there is a value at a path."""
    for name in path:
        if not isinstance(values, dict) or name not in values:
            return False
        values = values[name]
    return True

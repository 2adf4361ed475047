"""Reads the configuration: built-in defaults, one YAML file, environment overrides.

A value is overridden by an environment variable named ``OMNIRELAY_`` and the path of the key, joined by two
underscores (``OMNIRELAY_GATEWAY__LISTEN=tcp://0.0.0.0:5555``); ``OMNI_MODEL`` sets the checkpoint.  Unknown
keys are errors, except variables that Kubernetes sets for Services.  No value is imported or executed.
"""

import logging
import os
from collections.abc import Hashable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from omnirelay.errors import ConfigError
from omnirelay.values import API_KEY_VARIABLE
from shared.config.kubernetes import is_for_a_service
from shared.config.stack import Config
from shared.config.values import Section

ENV_PREFIX: Final = "OMNIRELAY_"
MODEL_VARIABLE: Final = "OMNI_MODEL"
REFUSED: Final = {
    "stages.talker.prompt_mode": "was removed: every prompt is computed as the released weights were trained",
    "stages.token2wav.synthesis.chunk_growth": (
        "was removed: a chunk is cut when its listener needs it; a request's chunk_frames gives fixed sizes"
    ),
    "stages.token2wav.synthesis.left_context_blocks": (
        "was removed: a chunk continues from the keys and values of the one before it"
    ),
    "stages.thinker.max_held_bytes": "was removed: media.max_held_bytes bounds the thinker",
    "stages.token2wav.max_held_bytes": "was removed: window_bytes and the batch bound token2wav",
    "stages.token2wav.engine.tensor_parallel_size": (
        "does not exist: token2wav's model is small and computes on one device; stages.token2wav.replicas "
        "adds processes that share its requests"
    ),
}
"""Keys of earlier versions and what replaced them; keys that other stages have, and why one does not."""
NOT_YAML: Final = (
    yaml.YAMLError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    TypeError,
    RecursionError,
)
"""What PyYAML raises: its own error, and what escapes it, as for ``2024-99-99`` or ``!!bool x``."""
log = logging.getLogger(__name__)


def load_config(path: Path | None = None, environment: dict[str, str] | None = None) -> Config:
    """Read the configuration.

    Args:
        path: The YAML file; None starts from the defaults.
        environment: Where overrides are looked up; None is the process's environment.

    Raises:
        ConfigError: The file cannot be read, or a key or value is not allowed; all problems are listed.
    """
    source = str(path) if path else "the built-in configuration"
    return check_values(read_values(path, environment), f"{source} (with environment overrides)")


def read_values(path: Path | None = None, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Read what a file and the environment set, unchecked; arguments and errors as of :func:`load_config`."""
    values = _read_file(path) if path else {}
    _apply_overrides(values, dict(os.environ) if environment is None else environment)
    return values


def check_values(values: dict[str, Any], source: str) -> Config:
    """Make a configuration of what was set.

    Raises:
        ConfigError: A key or value is not allowed; the message begins with ``source``.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(map(_describe, error.errors()))
        raise ConfigError(f"{source}: {problems}") from error


def is_ours(variable: str) -> bool:
    """Whether an environment variable may override the configuration."""
    return variable == MODEL_VARIABLE or (variable.startswith(ENV_PREFIX) and variable != API_KEY_VARIABLE)


def holds_nothing(path: Path) -> bool:
    """Whether a configuration file that can be read holds no key."""
    return not _read_file(path)


def tell_ignored(environment: Mapping[str, str] = os.environ) -> None:
    """Log the variables with our prefix that are ignored because Kubernetes sets them."""
    if ignored := sorted(name for name, text in environment.items() if is_for_a_service(name, text)):
        log.info("ignored, as Kubernetes sets them for Services: %s", ", ".join(ignored))


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, except that a repeated key is an error: PyYAML keeps the last one."""

    # A copy: lmformatenforcer, which vLLM imports, changes PyYAML's own, and then dates are text.
    yaml_constructors: ClassVar = dict(yaml.SafeLoader.yaml_constructors)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            name, line = (key.tag, key.value), key.start_mark.line + 1
            if name in lines:
                raise yaml.YAMLError(f"line {line} repeats the key {key.value!r} of line {lines[name]}")
            lines[name] = line
        return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506 - a safe one


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = _read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except NOT_YAML as error:
        raise ConfigError(f"{path} is not valid YAML: {_in_one_line(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not a {type(values).__name__}")
    return values


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _apply_overrides(values: dict[str, Any], environment: dict[str, str]) -> None:
    """Write the environment's overrides into the mapping; scalars are read as YAML."""
    if model := environment.get(MODEL_VARIABLE):
        values["model"] = model
    # In order, so that a key within a section counts more than the section, wherever the two stand.
    for name, text in sorted(environment.items()):
        if not name.startswith(ENV_PREFIX) or name == API_KEY_VARIABLE or is_for_a_service(name, text):
            continue
        *sections, key = name.removeprefix(ENV_PREFIX).lower().split("__")
        section = values
        for part in sections:
            inner = section.get(part, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{name}: {part} is a value, not a section")
            # A copy: an anchor of YAML makes one object of several sections.
            section[part] = section = dict(inner)
        try:
            section[key] = _read_yaml(text)
        except NOT_YAML as error:
            raise ConfigError(f"{name}={text!r} is not a YAML value: {_in_one_line(error)}") from error


def _describe(problem: ErrorDetails) -> str:
    """What is wrong with one key."""
    key = ".".join(map(str, problem["loc"]))
    variable = ENV_PREFIX + key.upper().replace(".", "__")
    where = f"{key} (set by {variable})" if variable in os.environ else key
    if key in REFUSED:
        return f"{where} {REFUSED[key]}"
    if problem["type"] != "extra_forbidden":
        return ": ".join(filter(None, [where, problem["msg"]]))
    nearest = _nearest(key)
    return f"{where}: no such key" + (f", did you mean {nearest}?" if nearest else "")


def _nearest(key: str) -> str | None:
    """The nearest known key: one of a similar name in the section, else one of this name elsewhere."""
    section, _, name = key.rpartition(".")
    places = {known: known.rpartition(".") for known in _keys(Config)}
    siblings = {place[2]: known for known, place in places.items() if place[0] == section}
    if similar := get_close_matches(name, siblings, 1):
        return siblings[similar[0]]
    return next((known for known, place in places.items() if place[2] == name), None)


def _keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every key and section of the configuration."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _keys(field.annotation, f"{prefix}{name}.")

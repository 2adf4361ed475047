"""The fields of a request: honoured, ignored if they cannot change the answer, or refused.

docs/api.md has the rule.  Unknown fields are refused too: what a misspelt one would have changed is unknown.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import msgspec

from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.values import in_words

IGNORED: Final = frozenset(
    {
        "include_reasoning",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "request_id",
        "return_stage_metrics",
        "safety_identifier",
        "service_tier",
        "store",
        "tracing",
        "user",
        "verbosity",
    }
)
"""Fields that cannot change the answer: for OpenAI's accounts, caches and logs, or for models that reason."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "moderation": (),
    "prompt_logprobs": (0,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields of OpenAI's and vLLM's APIs that are accepted with these values or null only."""
_PATH: Final = re.compile(r" - at `\$\.?([^`]*)`\Z")
_NAME: Final = re.compile(r"Object (?:missing required|contains unknown) field `([^`]*)`")
"""msgspec's message for a missing or unknown field."""

_EXACT: Final = 2**53
"""Below it each integer is a float of its own."""

T = TypeVar("T")


def read_fields(
    values: Mapping[str, Any], kind: type[T], neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> T:
    """Convert a JSON object to a struct; the neutral fields, besides, may have the values given for them.

    Raises:
        UnsupportedError: A field has a value that is not supported.
        InvalidRequestError: A field is unknown, missing or invalid.
    """
    honoured = {field.encode_name for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in honoured and name not in IGNORED:
            require_neutral(name, value, neutral)
    wanted = {name: whole(value) for name, value in given(values).items() if name in honoured}
    return convert(wanted, kind)


def convert(value: Any, kind: type[T], where: str = "", what: str = "the body") -> T:
    """Convert a JSON value, found at ``where`` in a request or event, which errors call ``what``.

    Raises:
        InvalidRequestError: It is not of that type; ``param`` is the place.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        said = in_words(str(error))
        found = _PATH.search(said)
        inside = found[1] if found else ""
        problem = said[: found.start()] if found else said
        place = _joined(where, inside)
        name = _NAME.match(problem)
        param = _joined(place, name[1][:64]) if name else place
        raise InvalidRequestError(f"{place or what}: {problem}", param or None) from error


def convert_given(values: Any, kind: Any, where: str = "") -> Any:
    """As :func:`convert`, of an object in which null counts as left out."""
    return convert(given(values) if isinstance(values, Mapping) else values, kind, where)


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


@contextmanager
def named(names: Mapping[str, str | None]) -> Iterator[None]:
    """Rename ``param`` of errors about a :class:`omnirelay.protocol.GenerateRequest` for the client."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param is not None:
            error.param = names.get(error.param, error.param)
        raise


def require_one_of(name: str, value: str | None, allowed: Collection[str]) -> None:
    """Check that a value, if given, is one of those allowed.

    Raises:
        UnsupportedError: It is not.
    """
    if value is not None and value not in allowed:
        raise UnsupportedError(f"{name} can be {', '.join(sorted(allowed))}, not {value[:64]!r}", name)


def whole(value: Any) -> Any:
    """Return an integer for a number that is one: JavaScript's and some of Python's clients write 10.0."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _EXACT else value


def _joined(place: str, inside: str) -> str:
    return place + ("." if place and inside and not inside.startswith("[") else "") + inside


def require_neutral(name: str, value: Any, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Check the value of a field that is not honoured.

    Raises:
        UnsupportedError: It would change the answer.
        InvalidRequestError: There is no such field.
    """
    if name not in neutral:
        raise InvalidRequestError(f"there is no field {name[:64]!r}", name[:64])
    # 1 == True in Python, but not in JSON.
    if value is not None and not any(value == each and _kind(value) is _kind(each) for each in neutral[name]):
        allowed = " or ".join(msgspec.json.encode(each).decode() for each in (*neutral[name], None))
        raise UnsupportedError(f"{name} is not supported: it can only be {allowed}, or be left out", name)


def _kind(value: Any) -> type:
    return float if type(value) is int else type(value)

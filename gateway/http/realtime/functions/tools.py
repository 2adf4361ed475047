"""The functions of a session or response, in OpenAI's realtime form."""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from gateway.http.fields import convert
from gateway.http.openai.tools import MAX_TOOLS, Choice, ChosenFunction, ChosenTool, Function, Tool
from gateway.input.json_schema import require_feasible
from omnirelay.errors import InvalidRequestError, UnsupportedError

MAX_TOOLS_BYTES: Final = 2**18
"""Size of all functions together as JSON."""
WORDS: Final = ("none", "auto", "required")


class _FunctionTool(Function, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function, without the object around it that chats have."""


def read_tools(values: Any, where: str, unavailable: Callable[[UnsupportedError], None]) -> tuple[Tool, ...]:
    """Read the tools of an event, found at ``where`` in it.

    Args:
        unavailable: Called with each tool that is not a function; the others are taken if it returns.

    Raises:
        InvalidRequestError: They are invalid, too many or too large.
        UnsupportedError: From ``unavailable``.
    """
    if not isinstance(values, list) or len(values) > MAX_TOOLS:
        raise InvalidRequestError(f"{where} must be a list of at most {MAX_TOOLS} functions", where)
    tools = []
    for at, each in enumerate(values):
        place = f"{where}[{at}]"
        if isinstance(each, dict) and each.get("type") != "function":
            problem = f"{place}.type can be function, not {str(each.get('type'))[:64]!r}"
            unavailable(UnsupportedError(problem, f"{place}.type"))
            continue
        given: _FunctionTool = convert(each, _FunctionTool, place)
        _check(given.parameters, f"{place}.parameters")
        tools.append(Tool("function", convert(msgspec.structs.asdict(given), Function, place)))
    if len(msgspec.json.encode(tools)) > MAX_TOOLS_BYTES:
        raise InvalidRequestError(f"{where} are limited to {MAX_TOOLS_BYTES} bytes of JSON", where)
    return tuple(tools)


def read_choice(value: Any, where: str) -> Choice:
    """Read ``tool_choice``.

    Raises:
        InvalidRequestError: It is invalid.
    """
    if isinstance(value, str) and value in WORDS:
        return next(word for word in WORDS if word == value)
    if not isinstance(value, dict) or value.get("type") != "function":
        raise InvalidRequestError(f"{where} can be {', '.join(WORDS)}, or a function", where)
    # The name is at the top here, as in responses; chats have it one level deeper.
    named = {"name": value["name"]} if isinstance(value.get("name"), str) else value.get("function")
    return ChosenTool("function", convert(named, ChosenFunction, where))


def shown_tools(tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    """Return functions in OpenAI's realtime form."""
    return [{"type": "function", **msgspec.to_builtins(tool.function)} for tool in tools]


def shown_choice(choice: Choice) -> str | dict[str, str]:
    """Return ``tool_choice`` in that form."""
    if isinstance(choice, ChosenTool):
        return {"type": "function", "name": choice.function.name}
    return choice


def _check(parameters: dict[str, Any] | None, where: str) -> None:
    try:
        require_feasible(msgspec.json.encode(parameters).decode())
    except InvalidRequestError as error:
        error.param = where
        raise

"""Functions that the model may call in a session, and the items of calls and of their results."""

import secrets
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta

from gateway.http.fields import convert, named
from gateway.http.openai.messages import PastFunction
from gateway.input.json_schema import require_feasible
from omnirelay.content import Role
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.tools import MAX_TOOLS, Choice, ChosenFunction, ChosenTool, Function, Tool, result_text
from omnirelay.values import PlainName

MAX_TOOLS_BYTES: Final = 2**18
"""Size of all functions together as JSON."""
WORDS: Final = ("none", "auto", "required")


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
        # Without the object around it that chats have.
        given: dict[str, Any] = convert(each, dict[str, Any], place)
        if (kind := given.pop("type", None)) != "function":
            unavailable(
                UnsupportedError(f"{place}.type can be function, not {str(kind)[:64]!r}", f"{place}.type")
            )
            continue
        function = convert(given, Function, place)
        with named({"text_sampling.json_schema": f"{place}.parameters"}):
            require_feasible(msgspec.json.encode(function.parameters).decode())
        tools.append(Tool("function", function))
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


MAX_TEXT: Final = 2**20
"""Characters of arguments, and of a result."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
ShortId = Annotated[str, Meta(min_length=1, max_length=64)]


def new_call_id() -> str:
    """Return an id that no call has."""
    return f"call_{secrets.token_hex(8)}"


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Fields of all items; those of clients besides ``id`` change nothing."""

    id: ShortId | None = None
    object: ShortId | None = None
    status: ShortId | None = None

    @property
    def shown(self) -> dict[str, str]:
        """The fields that clients see."""
        values: dict[str, str] = msgspec.to_builtins(self)
        return {name: each for name, each in values.items() if name not in _Fields.__struct_fields__}


class FunctionCall(_Fields, frozen=True, tag="function_call"):
    """A call of the model."""

    role: ClassVar[Role] = "assistant"
    name: PlainName
    arguments: Text
    call_id: ShortId = msgspec.field(default_factory=new_call_id)

    @property
    def text(self) -> str:
        """The call as the model wrote it."""
        return PastFunction(self.name, self.arguments).text


class FunctionOutput(_Fields, frozen=True, tag="function_call_output"):
    """What a function returned."""

    role: ClassVar[Role] = "user"
    call_id: ShortId
    output: Text

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        return result_text(self.output)


FunctionItem = FunctionCall | FunctionOutput

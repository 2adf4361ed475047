"""Functions that the model may call, their calls, and their results."""

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from omnirelay.content import ChatMessage
from omnirelay.values import PlainName

MAX_TOOLS: Final = 128


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function; ``strict`` is ignored, because arguments are never checked.

    Attributes:
        name: Letters, digits, ``_``, ``.`` and ``-``.
        parameters: A JSON schema.
        strict: Ignored.
    """

    name: PlainName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's form of a function."""

    type: Literal["function"]
    function: Function


class ChosenFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of a function."""

    name: PlainName


class ChosenTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function that must be called."""

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | ChosenTool


class Call(msgspec.Struct, frozen=True):
    """A call in an answer, with its arguments as JSON.

    Attributes:
        name: The function's.
        arguments: JSON.
    """

    name: str
    arguments: str


def result_text(content: str) -> str:
    """What a function returned, as the model reads it."""
    return f"<tool_response>\n{content}\n</tool_response>"


def tool_result(*contents: str) -> ChatMessage:
    """The message that tells the model what functions returned, in the order of its calls."""
    return ChatMessage("user", "\n".join(map(result_text, contents)))

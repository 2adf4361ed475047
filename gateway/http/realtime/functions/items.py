"""What the items of calls and of their results have, besides ids."""

import secrets
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.http.openai.tools import Name, PastFunction, result_text
from omnirelay.content import Role

MAX_TEXT: Final = 2**20
"""Characters of arguments, and of a result."""
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
CallId = Annotated[str, Meta(min_length=1, max_length=64)]


def new_call_id() -> str:
    """Return an id that no call has."""
    return f"call_{secrets.token_hex(8)}"


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Fields of all items; those of clients besides ``id`` change nothing."""

    id: CallId | None = None
    object: str | None = None
    status: str | None = None


class FunctionCall(_Fields, frozen=True, tag="function_call"):
    """A call of the model."""

    name: Name
    arguments: Text
    call_id: CallId = msgspec.field(default_factory=new_call_id)

    @property
    def role(self) -> Role:
        """Who said it."""
        return "assistant"

    @property
    def text(self) -> str:
        """The call as the model wrote it."""
        return PastFunction(self.name, self.arguments).text

    @property
    def shown(self) -> dict[str, str]:
        """The fields that clients see."""
        return {
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionOutput(_Fields, frozen=True, tag="function_call_output"):
    """What a function returned."""

    call_id: CallId
    output: Text

    @property
    def role(self) -> Role:
        """Who said it."""
        return "user"

    @property
    def text(self) -> str:
        """The result as the model reads it."""
        return result_text(self.output)

    @property
    def shown(self) -> dict[str, str]:
        """The fields that clients see."""
        return {"type": "function_call_output", "call_id": self.call_id, "output": self.output}


FunctionItem = FunctionCall | FunctionOutput

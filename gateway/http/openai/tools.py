"""Calls of functions in OpenAI's form."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from gateway.input.tools import BEGIN, END
from omnirelay.tools import Call


class PastFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that was called."""

    name: str
    arguments: str

    @property
    def text(self) -> str:
        """The call as the model wrote it."""
        try:
            arguments: Any = msgspec.Raw(msgspec.json.encode(msgspec.json.decode(self.arguments)))
        except (msgspec.DecodeError, RecursionError):
            arguments = self.arguments
        call = msgspec.json.encode({"name": self.name, "arguments": arguments}).decode()
        return f"{BEGIN}\n{call}\n{END}"


class PastCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an earlier message."""

    function: PastFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: Any = None


def call_object(request_id: str, number: int, call: Call) -> dict[str, Any]:
    """Build OpenAI's form of a call, the first of which has number 0."""
    function: Mapping[str, str] = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{request_id}_{number}", "type": "function", "function": function}

"""Functions that the model may call, in Hermes' format, which Qwen2.5 was trained on.

The functions are described in the system message; a call is JSON between two marks in the text.  A call that
cannot be read stays text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gateway.input.json_schema import require_feasible, role_in
from omnirelay.content import ChatMessage, TextPart, parts_of
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.events import DoneEvent, Event
from omnirelay.protocol import GenerateRequest
from omnirelay.tools import Call, Choice, ChosenTool, Function, Tool

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
EXPLANATION: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""As in the chat templates of Qwen2.5."""
_CALL: Final = '{"name":'
"""How a call without marks begins, white space apart."""


def with_tools(request: GenerateRequest) -> tuple[GenerateRequest, "CallParser"]:
    """Describe a request's functions in its messages; the parser finds the calls in the answer.

    Raises:
        UnsupportedError: Speech is asked for, too.
        InvalidRequestError: No messages, an unknown function, or a schema is no JSON or too much.
    """
    tools, choice = request.tools, request.tool_choice
    bare = replace(request, tools=[], tool_choice=None)
    try:
        msgspec.json.encode(tools)
    except (TypeError, RecursionError) as error:
        # msgpack has more than JSON.
        raise InvalidRequestError(f"tools cannot be written as JSON: {error}", "tools") from error
    schema, asked = forced_schema(tools, choice), request.text_sampling.json_schema
    if not tools or choice == "none":
        return bare, CallParser()
    if request.speech:
        raise UnsupportedError("tools are for answers in text only: calls would be spoken", "tools")
    if not request.messages:
        raise InvalidRequestError("tools are described in messages, and there are none", "tools")
    # A call that must be made has no other form.
    if schema is None and asked is not None:
        schema = calls_or(tools, asked)
    parser = CallParser(frozenset(tool.function.name for tool in tools), schema is not None)
    sampling = replace(request.text_sampling, json_schema=schema)
    return replace(bare, messages=explained(request.messages, tools), text_sampling=sampling), parser


def with_calls(event: Event, parser: "CallParser") -> Event:
    """Return an answer's event; the last one with the calls, and its text as the model reads it again."""
    if not isinstance(event, DoneEvent):
        return event
    calls = [each for each in parser.push(event.text, last=True) if isinstance(each, Call)]
    return replace(event, text=parser.written(event.text), calls=calls)


def explained(messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """Describe the functions at the end of the system message, or in a new one."""
    listed = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    text = EXPLANATION.format(listed)
    if messages and messages[0].role == "system":
        parts = [*parts_of(messages[0]), TextPart(f"\n\n{text}")]
        return [ChatMessage("system", parts), *messages[1:]]
    return [ChatMessage("system", text), *messages]


def forced_schema(tools: Sequence[Tool], choice: Choice | None) -> str | None:
    """Return the schema of an answer that must be a call; none if it need not.

    Raises:
        InvalidRequestError: The chosen function is not among the tools, or its schema exceeds a bound.
    """
    if choice in (None, "auto", "none"):
        return None
    wanted = [tool.function for tool in tools]
    if isinstance(choice, ChosenTool):
        wanted = [function for function in wanted if function.name == choice.function.name]
    if not wanted:
        raise InvalidRequestError("tool_choice needs a function that is among the tools", "tool_choice")
    return _any_of(wanted)


def calls_or(tools: Sequence[Tool], schema: str) -> str:
    """Return the schema of an answer that is a call, or obeys another schema.

    Raises:
        InvalidRequestError: A function's schema exceeds a bound.
    """
    require_feasible(schema)
    return _any_of([tool.function for tool in tools], msgspec.json.decode(schema))


def _any_of(functions: Sequence[Function], other: Any = None) -> str:
    definitions: dict[str, Any] = {}
    schemas: list[Any] = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": _moved(_parameters(function), f"function{at}", definitions),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for at, function in enumerate(functions)
    ]
    if other is not None:
        schemas.append(_moved(other, "answer", definitions))
    whole = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return msgspec.json.encode(whole | ({"$defs": definitions} if definitions else {})).decode()


def _parameters(function: Function) -> dict[str, Any]:
    if not function.parameters:
        return {"type": "object"}
    require_feasible(msgspec.json.encode(function.parameters).decode())
    return function.parameters


def _moved(schema: Any, name: str, definitions: dict[str, Any]) -> Any:
    """Return a schema for a place within another: a definition of it, if it refers to its own parts."""

    def renamed(value: Any, role: str = "schema") -> Any:
        if isinstance(value, list):
            return [renamed(each, role) for each in value]
        if not isinstance(value, dict) or role == "value":
            return value
        found = {key: renamed(each, role_in(role, key)) for key, each in value.items()}
        if isinstance(target := found.get("$ref"), str) and target.startswith("#"):
            found["$ref"] = f"#/$defs/{name}{target[1:]}"
        return found

    moved = renamed(schema)
    if moved == schema:
        return schema
    definitions[name] = moved
    return {"$ref": f"#/$defs/{name}"}


@dataclass
class CallParser:
    """Finds the calls in an answer that arrives in pieces.

    Attributes:
        names: The functions that may be called; without any, all is text.
        bare: Calls have no marks: the whole answer is one, or is a text.
        several: More than one call may be made; else further ones are dropped.
        calls: How many there were.
    """

    names: frozenset[str] = frozenset()
    bare: bool = False
    several: bool = True
    calls: int = 0
    _held: str = field(default="", init=False)
    # Before it the end of a call that has begun does not begin.
    _searched: int = field(default=0, init=False)
    _is_text: bool = field(default=False, init=False)
    _dropped: list[str] = field(default_factory=list, init=False)

    @property
    def begun(self) -> bool:
        """A call was made, or what may be one has begun."""
        return self.bare or self.calls > 0 or BEGIN in self._held

    def push(self, text: str, last: bool = False) -> list[str | Call]:
        """Return the next texts and calls."""
        if not self.names:
            return [text] if text else []
        self._held += text
        found: list[str | Call] = []
        if self.bare:
            if last and self._held:
                self._take(self._held, self._held, found)
            elif not last and self._may_be_call():
                return found
            elif self._held:
                found.append(self._held)
                self._is_text = True
            self._held = ""
            return found
        while (begin := self._held.find(BEGIN)) >= 0:
            end = self._held.find(END, max(begin, self._searched))
            if end < 0 and not last:
                break
            self._searched = 0
            # White space before a call is not shown.
            if said := self._held[:begin].rstrip():
                found.append(said)
            size = len(self._held) if end < 0 else end + len(END)
            inside = self._held[begin + len(BEGIN) : size if end < 0 else end]
            self._take(inside, self._held[len(said) : size], found)
            self._held = self._held[size:]
        shown = len(self._held) if last else self._open(begin)
        if shown and not (last and self.calls and not self._held.strip()):
            found.append(self._held[:shown])
        self._held = self._held[shown:]
        self._searched = len(self._held) - len(END)
        return found

    def written(self, text: str) -> str:
        """Return a whole answer in the form in which the model reads it again, without dropped calls."""
        for each in self._dropped:
            text = text.replace(each, "", 1)
        return f"{BEGIN}\n{text}\n{END}" if self.bare and self.calls else text

    def _may_be_call(self) -> bool:
        """Whether an answer without marks can still become a call."""
        begun = "".join(self._held[: 4 * len(_CALL)].split())
        return not self._is_text and (begun.startswith(_CALL) or _CALL.startswith(begun))

    def _open(self, begin: int) -> int:
        """How much of the text that is held is not a part of a call, nor of white space before one."""
        if begin < 0:
            sizes = range(min(len(BEGIN) - 1, len(self._held)), 0, -1)
            begin = len(self._held) - next((n for n in sizes if BEGIN.startswith(self._held[-n:])), 0)
        return len(self._held[:begin].rstrip())

    def _take(self, inside: str, whole: str, found: list[str | Call]) -> None:
        call = self._read(inside)
        if call is None:
            found.append(whole)
        elif self.several or not self.calls:
            self.calls += 1
            found.append(call)
        else:
            self._dropped.append(whole)

    def _read(self, text: str) -> Call | None:
        try:
            value = msgspec.json.decode(text.strip(), type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return None
        name, arguments = value.get("name"), value.get("arguments")
        if not isinstance(name, str) or name not in self.names or not isinstance(arguments, dict):
            return None
        return Call(name, msgspec.json.encode(arguments).decode())

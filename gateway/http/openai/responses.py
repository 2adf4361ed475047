"""``/v1/responses``: OpenAI's newer form of a chat, without memory.

The body becomes a chat's, and the answer the events of a response.
"""

import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.answer import HttpAnswer, begin, finish_reason, usage_of
from gateway.http.context import HttpContext
from gateway.http.errors import json_response
from gateway.http.fields import read_fields
from gateway.http.openai.chat_request import ChatAnswerOptions, read_chat
from gateway.http.openai.tools import Call, call_object
from gateway.http.streams import EventStream
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.events import DoneEvent, TextEvent

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Fields that are accepted with these values or null only."""
NAMES: Final[Mapping[str, str | None]] = {"messages": "input", "text_sampling.json_schema": "text.format"}
"""Names here of fields of a chat and of a :class:`omnirelay.protocol.GenerateRequest`, where they differ."""
PARTS: Final = {"input_text": "text", "output_text": "text", "refusal": "text", "text": "text"}


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the text; ``verbosity`` may only have its default."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    stream: bool = False


def as_chat(values: dict[str, Any]) -> dict[str, Any]:
    """Convert a body to that of a chat, which checks the rest of it.

    Raises:
        InvalidRequestError: It is invalid, or asks for something that is not supported.
    """
    fields = read_fields(values, ResponseFields, NEUTRAL)
    items = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    for at, item in enumerate(items):
        _append(messages, item, f"input[{at}]")
    choice = fields.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": _without(choice, "type")}
    return {
        "model": fields.model,
        "messages": messages,
        "max_completion_tokens": fields.max_output_tokens,
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "response_format": _format(fields.text),
        "tools": [_tool(tool, f"tools[{at}]") for at, tool in enumerate(fields.tools)],
        "tool_choice": choice,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "stream": fields.stream,
    }


class ResponsesApi:
    """The endpoint."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Answer; errors are those of :func:`gateway.http.answer.begin`."""
        context = self._context
        limits, media = context.config.gateway.limits, context.config.media
        read = partial(
            read_chat,
            max_text_tokens=limits.max_text_tokens,
            max_item_bytes=media.max_item_bytes,
            as_chat=as_chat,
        )
        options, answer = await begin(context, request, read, NAMES)
        writer = ResponseWriter(context.model, answer, options)
        if options.events:
            return EventStream(writer.events(), answer, context.told)
        async with answer.reading(request.receive):
            async for event in writer.events():
                last = event
        return json_response(last["response"], headers=answer.headers)


class ResponseWriter:
    """An answer as the events of a response; the last one has the whole response."""

    def __init__(self, model: str, answer: HttpAnswer, options: ChatAnswerOptions) -> None:
        self._answer = answer
        self._calls = options.call_parser()
        self._output: list[dict[str, Any]] = []
        self._said: list[str] | None = None
        self._number = 0
        self._head = {
            "id": f"resp_{answer.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": options.parallel,
            "tool_choice": "auto",
            "tools": [],
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events as the answer is generated."""
        await self._answer.begin()
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", None))
        async for event in self._answer:
            if isinstance(event, DoneEvent):
                done = event
            elif isinstance(event, TextEvent):
                for each in self._pieces(event.text):
                    yield each
        for each in self._pieces("", last=True):
            yield each
        for each in self._end_text():
            yield each
        cut = finish_reason(done) == "length"
        status = "incomplete" if cut else "completed"
        yield self._event(f"response.{status}", response=self._response(status, done))

    def _pieces(self, text: str, last: bool = False) -> Iterator[dict[str, Any]]:
        found: list[str | Call] = [text] if text else []
        if self._calls is not None:
            found = self._calls.push(text, last)
        for each in found:
            yield from self._call(each) if isinstance(each, Call) else self._text(each)

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        if self._said is None:
            self._said = []
            yield self._event("response.output_item.added", item=self._message("in_progress", []))
            yield self._part("response.content_part.added", part=_text_part(""))
        self._said.append(text)
        yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def _end_text(self) -> Iterator[dict[str, Any]]:
        if self._said is None:
            return
        part = _text_part("".join(self._said))
        message = self._message("completed", [part])
        yield self._part("response.output_text.done", text=part["text"], logprobs=[])
        yield self._part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", item=message)
        self._output.append(message)
        self._said = None

    def _call(self, call: Call) -> Iterator[dict[str, Any]]:
        yield from self._end_text()
        made = call_object(self._answer.request_id, len(self._output), call)
        item = {
            "id": f"fc_{self._answer.request_id}_{len(self._output)}",
            "type": "function_call",
            "call_id": made["id"],
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", item=begun)
        place = {"item_id": item["id"]}
        yield self._event("response.function_call_arguments.delta", delta=call.arguments, **place)
        done = {"name": call.name, "arguments": call.arguments, **place}
        yield self._event("response.function_call_arguments.done", **done)
        yield self._event("response.output_item.done", item=item)
        self._output.append(item)

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"msg_{self._answer.request_id}_{len(self._output)}"
        return {"id": name, "type": "message", "role": "assistant", "status": status, "content": content}

    def _part(self, kind: str, **fields: Any) -> dict[str, Any]:
        name = f"msg_{self._answer.request_id}_{len(self._output)}"
        return self._event(kind, item_id=name, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number, self._number = self._number, self._number + 1
        place = {} if "response" in fields else {"output_index": len(self._output)}
        return {"type": kind, "sequence_number": number, **place, **fields}

    def _response(self, status: str, done: DoneEvent | None) -> dict[str, Any]:
        usage = None
        if done is not None:
            usage = usage_of(done, "input", "output", "tokens_details")
            usage["output_tokens_details"] = {"reasoning_tokens": 0}
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ending = {"incomplete_details": details, "output": list(self._output), "usage": usage}
        return {**self._head, "status": status, **ending}


def _append(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add an item to a conversation; calls join the assistant's message before them."""
    kind = item.get("type", "message")
    if kind == "message":
        content = item.get("content")
        if isinstance(content, list):
            content = [_content_part(part, f"{where}.content[{at}]") for at, part in enumerate(content)]
        messages.append({"role": item.get("role"), "content": content})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = messages[-1].setdefault("tool_calls", [])
        calls.append({"id": str(item.get("call_id")), "type": "function", "function": function})
    elif kind == "function_call_output":
        output = item.get("output")
        if isinstance(output, list):
            output = [_content_part(part, f"{where}.output[{at}]") for at, part in enumerate(output)]
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
    elif kind != "reasoning":
        raise UnsupportedError(f"{where}.type cannot be {str(kind)[:64]!r}", f"{where}.type")


def _content_part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} is not an object", where)
    kind = part.get("type")
    if kind in PARTS:
        return {"type": "text", "text": part.get("refusal" if kind == "refusal" else "text")}
    if kind == "input_image" and part.get("file_id") is None:
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    if kind == "input_audio":
        return part
    kinds = "input_text, input_image with image_url, input_audio or output_text"
    raise UnsupportedError(f"{where}.type can be {kinds}", f"{where}.type")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UnsupportedError(f"{where}.type can only be function", f"{where}.type")
    return {"type": "function", "function": _without(tool, "type")}


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None or text.format.get("type") != "json_schema":
        return text.format if text is not None else None
    return {"type": "json_schema", "json_schema": _without(text.format, "type")}


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

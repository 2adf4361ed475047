"""``/v1/responses``: OpenAI's newer form of a chat, which can continue an earlier response.

The body becomes a chat's, and the answer the events of a response.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from gateway.http.answer import HttpAnswer, begin, reading
from gateway.http.context import Api, HttpContext
from gateway.http.errors import json_response
from gateway.http.fields import named, read_fields
from gateway.http.openai.chat import NAMES as CHAT_NAMES
from gateway.http.openai.chat_request import ChatAnswerOptions, read_chat
from gateway.http.openai.kept_answers import KeptAnswers
from gateway.http.openai.response_writer import ResponseWriter
from gateway.http.openai.strings import Body, parse
from gateway.http.streams import EventStream
from omnirelay.content import ChatMessage, MediaPart, parts_of
from omnirelay.errors import InvalidRequestError, UnknownResponseError, UnsupportedError
from omnirelay.protocol import GenerateRequest

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled", "auto"),
}
"""Fields that are accepted with these values or null only; a prompt that is too long is refused."""
CHATS: Final = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "priority",
        "repetition_penalty",
        "seed",
        "stop",
        "top_k",
    }
)
"""Fields of vLLM's API that mean what they mean in a chat."""
NAMES: Final[Mapping[str, str | None]] = {
    **CHAT_NAMES,
    "messages": "input",
    "response_format.type": "text.format.type",
    "response_format.json_schema.schema": "text.format.schema",
    "text_sampling.json_schema": "text.format",
}
"""Names here of fields of a chat and of a :class:`omnirelay.protocol.GenerateRequest`, where they differ."""
PARTS: Final = {"input_text": "text", "output_text": "text", "refusal": "text", "text": "text"}
CREATE: Final = "response.create"
CANCEL: Final = "response.cancel"
LOGPROBS: Final = "message.output_text.logprobs"
OBJECT_BYTES: Final = 128
"""What a message, or a part of one, takes besides its content."""
MAX_KEPT_BYTES: Final = 64 * 2**20
"""Earlier responses that are kept, with the conversations before them, of all clients together."""


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]


class TextOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the text; ``verbosity`` is ignored."""

    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured; ``stream_options`` cannot change an answer.

    Attributes:
        model: As in a chat.
        input: A text, or items: messages with ``input_text``, ``input_image``, ``input_audio`` and
            ``output_text``; ``function_call``; ``function_call_output``. Items ``reasoning`` are ignored;
            references to items are refused.
        instructions: The system message, of this response only.
        previous_response_id: The response that this one continues.
        max_output_tokens: Most text tokens.
        metadata: Up to 16 texts by names, which the response repeats.
        temperature: As in a chat.
        top_p: As in a chat.
        text: ``format`` is a chat's ``response_format`` (docs/api-chat.md#json); ``verbosity`` is ignored.
        tools: Functions only.
        tool_choice: As in a chat.
        parallel_tool_calls: As in a chat.
        stream: As in a chat.
        stream_options: Ignored.
        include: Ignored, except ``message.output_text.logprobs``, which is refused.
        store: Keep this response, so that a later one can continue it.
        generate: If false, by WebSocket: only keep ``input`` for a later response.
    """

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    metadata: Metadata = {}
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: Any = None
    include: list[str] = []
    store: bool = True
    generate: bool = True


@dataclass(frozen=True)
class ResponseOptions(ChatAnswerOptions):
    """How a client wants its response.

    Attributes:
        shown: Fields that the response repeats.
        store: A later response may continue it.
        generate: Answer; else the input is only kept.
        conversation: The input, behind that of earlier responses; without instructions.
    """

    shown: dict[str, Any] = field(kw_only=True)
    store: bool = field(kw_only=True)
    generate: bool = field(kw_only=True)
    conversation: Sequence[ChatMessage] = field(kw_only=True)


Earlier = Callable[[str], Sequence[ChatMessage] | None]
"""Gives the conversation that ends with a response; none if it is not kept."""


def read_response(
    body: Body, max_text_tokens: int, earlier: Earlier
) -> tuple[ResponseOptions, GenerateRequest]:
    """Check a body.

    Raises:
        UnknownResponseError: The response that it continues is not kept.
        InvalidRequestError: It is invalid, or asks for something that is not supported.
    """
    values, strings = body
    chat = {name: values.pop(name) for name in CHATS & values.keys()}
    fields = read_fields(values, ResponseFields, NEUTRAL)
    if LOGPROBS in fields.include:
        raise UnsupportedError(f"include cannot have {LOGPROBS}", "include")
    if strings.has_word(str(fields.metadata)):
        raise InvalidRequestError("metadata has a text of more than 512 characters", "metadata")
    conversation: list[ChatMessage] = []

    def continued(messages: list[ChatMessage]) -> list[ChatMessage]:
        system, own = (messages[:1], messages[1:]) if fields.instructions else ([], messages)
        if (name := fields.previous_response_id) is not None:
            before = earlier(name)
            if before is None:
                raise UnknownResponseError(
                    f"the response {name[:64]!r} is not kept here: send the conversation in input",
                    "previous_response_id",
                )
            conversation.extend(before)
        conversation.extend(own)
        return [*system, *conversation]

    asked, places = _chat(fields)
    with named(NAMES):
        options, request = read_chat(
            Body(chat | asked, strings), max_text_tokens, continued=continued, places=places
        )
    kept = ResponseOptions(
        **vars(options),
        shown=_shown(fields) | {"instructions": fields.instructions and strings.text(fields.instructions)},
        store=fields.store,
        generate=fields.generate,
        conversation=conversation,
    )
    return kept, request


def _shown(fields: ResponseFields) -> dict[str, Any]:
    names = ("max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id")
    shown = {name: getattr(fields, name) for name in (*names, "store", "temperature", "tools", "top_p")}
    form = fields.text.format if fields.text else None
    return shown | {"text": {"format": form or {"type": "text"}}, "tool_choice": fields.tool_choice or "auto"}


def _chat(fields: ResponseFields) -> tuple[dict[str, Any], list[str]]:
    """Convert the fields to those of a chat, which checks the rest of them; and where its messages are."""
    items = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    places = ["instructions"] * len(messages)
    for at, item in enumerate(items):
        _append(messages, item, f"input[{at}]")
        places += [f"input[{at}]"] * (len(messages) - len(places))
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
    }, places


class ResponsesApi(Api):
    """The endpoint, and what it keeps of its responses."""

    def __init__(self, context: HttpContext) -> None:
        super().__init__(context)
        self._kept = KeptAnswers[Sequence[ChatMessage]](MAX_KEPT_BYTES)

    async def create(self, request: Request) -> Response:
        """Continue a conversation; errors are those of :func:`gateway.http.answer.begin`."""
        options, [answer] = await begin(self._context, request, partial(self.read, request), NAMES)
        writer = self.writer(request, options, answer)
        if options.events:
            return EventStream(writer.events(), [answer], self._context.told)
        async with reading(request.receive, answer):
            async for event in writer.events():
                last = event
        return json_response(last["response"], headers=answer.headers)

    def read(
        self, http: HTTPConnection, body: bytearray, event: bool = False
    ) -> tuple[ResponseOptions, GenerateRequest]:
        """Parse and check a client's body, or the ``event`` that has its fields; as :func:`read_response`."""
        values, strings = parse(body, self._context.max_item_bytes)
        earlier = partial(self._kept.get, self._context.share(http))
        given = Body(as_body(values) if event else values, strings)
        return read_response(given, self._context.max_text_tokens, earlier)

    def writer(self, http: HTTPConnection, options: ResponseOptions, answer: HttpAnswer) -> ResponseWriter:
        """Return what writes an answer, and keeps it if it is to be kept."""

        def keep(name: str, text: str) -> None:
            # What a connection answered can be continued on it, stored or not.
            if options.store or http.scope["type"] == "websocket":
                self.keep(http, name, options, text)

        return ResponseWriter(self._context.model, answer, options, options.shown, keep)

    def keep(self, http: HTTPConnection, name: str, options: ResponseOptions, text: str) -> None:
        """Keep a response of this text, and the conversation before it."""
        messages = list(options.conversation)
        if text:
            messages.append(ChatMessage("assistant", text))
        self._kept.keep(self._context.share(http), name, messages, sum(map(_size, messages)))


def as_body(event: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request that came as an event.

    Raises:
        InvalidRequestError: It is another event.
    """
    kind = event.pop("type", None)
    if kind != CREATE:
        raise InvalidRequestError(f"type can be {CREATE} or {CANCEL}, not {str(kind)[:64]!r}", "type")
    # All answers of a connection are streamed.
    return event | {"stream": True}


def _size(message: ChatMessage) -> int:
    """Bytes that a message takes, about: many empty ones take much, too."""
    return OBJECT_BYTES + sum(
        OBJECT_BYTES
        + (part.nbytes + len(part.url or "") if isinstance(part, MediaPart) else len(part.text.encode()))
        for part in parts_of(message)
    )


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
    # A type that is no text cannot be looked up.
    if isinstance(kind, str) and kind in PARTS:
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

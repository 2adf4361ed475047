"""An answer as the events of OpenAI's ``/v1/responses``."""

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway.http.answer import HttpAnswer, finish_reason, tokens_of, usage_of
from gateway.http.openai.chat_request import ChatAnswerOptions
from gateway.http.openai.messages import call_object
from omnirelay.events import DoneEvent, TextEvent
from omnirelay.tools import Call


@dataclass(eq=False)
class ResponseWriter:
    """An answer as the events of a response; the last one has the whole response.

    Attributes:
        _shown: Fields of the request that the response repeats.
        _keep: Called with the response's id and its whole text, before the last event.
    """

    _model: str
    _answer: HttpAnswer
    _options: ChatAnswerOptions
    _shown: dict[str, Any]
    _keep: Callable[[str, str], None]
    _output: list[dict[str, Any]] = field(default_factory=list)
    _said: list[str] | None = None
    _number: int = 0

    def __post_init__(self) -> None:
        self._calls = self._options.call_parser()
        self._head = _head(f"resp_{self._answer.request_id}", self._model, self._shown)

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
        status = "incomplete" if finish_reason(done) == "length" else "completed"
        for each in self._end_text(status):
            yield each
        self._keep(self._head["id"], self._calls.written(done.text))
        yield self._event(f"response.{status}", response=self._response(status, done))

    def cancelled(self) -> dict[str, Any]:
        """Return the last event of an answer that was cancelled, with the text so far."""
        if self._said is not None:
            self._output.append(self._message("incomplete", [_text_part("".join(self._said))]))
        response = self._response("incomplete", None) | {"status": "cancelled", "incomplete_details": None}
        return self._event("response.incomplete", response=response)

    def _pieces(self, text: str, last: bool = False) -> Iterator[dict[str, Any]]:
        for each in self._calls.push(text, last):
            yield from self._call(each) if isinstance(each, Call) else self._text(each)

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        if self._said is None:
            self._said = []
            yield self._event("response.output_item.added", item=self._message("in_progress", []))
            yield self._part("response.content_part.added", part=_text_part(""))
        self._said.append(text)
        yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def _end_text(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        if self._said is None:
            return
        part = _text_part("".join(self._said))
        message = self._message(status, [part])
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
        usage = None if done is None else _usage(usage_of(done, "input", "output", "tokens_details"))
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ending = {"incomplete_details": details, "output": list(self._output), "usage": usage}
        return {**self._head, "status": status, **ending}


def empty_response(model: str, shown: dict[str, Any]) -> dict[str, Any]:
    """Build a response without output, whose input is kept."""
    usage = _usage(tokens_of(0, 0, "input", "output") | {"input_tokens_details": {"cached_tokens": 0}})
    ending: dict[str, Any] = {"incomplete_details": None, "output": [], "usage": usage, "status": "completed"}
    return _head(f"resp_{secrets.token_hex(16)}", model, shown) | ending


def _usage(counted: dict[str, Any]) -> dict[str, Any]:
    """Return a ``usage`` with the details that responses have."""
    counted["input_tokens_details"]["cache_write_tokens"] = 0
    return {**counted, "output_tokens_details": {"reasoning_tokens": 0}}


def _head(name: str, model: str, shown: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        **shown,
    }


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

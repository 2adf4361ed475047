"""``/v1/completions``: the text that continues a text, without a chat template."""

import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.answer import HttpAnswer, begin, finish_reason
from gateway.http.context import Api
from gateway.http.fields import convert
from gateway.http.openai.chat import NAMES as CHAT_NAMES
from gateway.http.openai.chat import running_usage, stream_of, usage_of_chat, whole_of
from gateway.http.openai.chat_request import ChatAnswerOptions, read_chat
from gateway.http.openai.strings import Body, parse
from omnirelay.errors import InvalidRequestError, UnsupportedError
from omnirelay.events import DoneEvent, TextEvent
from omnirelay.protocol import GenerateRequest

MAX_TOKENS: Final = 16
"""Of an answer, unless more are asked for: as in OpenAI's API."""
OF_CHATS: Final = (
    "messages",
    "modalities",
    "audio",
    "tools",
    "tool_choice",
    "logprobs",
    "top_logprobs",
    "suffix",
    "resumable",
)
"""Fields that are for chats only, or that OpenAI has in another form here."""
NAMES: Final[Mapping[str, str | None]] = {
    **CHAT_NAMES,
    "messages": "prompt",
    "prompt_text": "prompt",
    "prompt_token_ids": "prompt",
}


def read_completion(body: Body, max_text_tokens: int) -> tuple[ChatAnswerOptions, GenerateRequest]:
    """Check a body.

    Raises:
        InvalidRequestError: It is invalid, or asks for something that is not supported.
    """
    values = dict(body.values)
    for name in OF_CHATS:
        if values.pop(name, None) is not None:
            raise UnsupportedError(f"{name} is not supported here", name)
    ids: list[int] | None = None
    prompt = values.pop("prompt", None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        ids = convert(prompt, list[int], "prompt")
    elif not isinstance(prompt, str):
        raise InvalidRequestError("prompt must be a text, or a list of token ids", "prompt")
    if values.get("max_tokens") is None and values.get("max_completion_tokens") is None:
        values["max_tokens"] = MAX_TOKENS
    values["messages"] = [{"role": "user", "content": prompt if ids is None else ""}]
    options, request = read_chat(Body(values, body.strings), max_text_tokens)
    text = request.messages[0].content if ids is None else None
    return options, msgspec.structs.replace(request, messages=[], prompt_text=text, prompt_token_ids=ids)


class CompletionsApi(Api):
    """The endpoint."""

    async def create(self, request: Request) -> Response:
        """Continue a text; errors are those of :func:`gateway.http.answer.begin`."""
        context = self._context

        def read(body: bytearray) -> tuple[ChatAnswerOptions, GenerateRequest]:
            return read_completion(parse(body, context.max_item_bytes), context.max_text_tokens)

        options, answers = await begin(context, request, read, NAMES)
        if options.events:
            return stream_of(context, answers, [self._events(options, answer) for answer in answers])
        return await whole_of(request, answers, [self._whole(answer) for answer in answers])

    async def _whole(self, answer: HttpAnswer) -> dict[str, Any]:
        done = await answer.last()
        whole = self._object(answer, done.text, finish_reason(done))
        return {**whole, "usage": usage_of_chat(done)}

    async def _events(
        self, options: ChatAnswerOptions, answer: HttpAnswer
    ) -> AsyncGenerator[dict[str, Any], None]:
        created = int(time.time())

        def chunk(text: str, reason: str | None = None) -> dict[str, Any]:
            usage = running_usage(self._context, options, answer)
            return {**self._object(answer, text, reason), "created": created, **usage}

        async for event in answer:
            if isinstance(event, TextEvent) and event.text:
                yield chunk(event.text)
            elif isinstance(event, DoneEvent):
                yield chunk("", finish_reason(event))
                if options.usage.include_usage:
                    yield {**chunk(""), "choices": [], "usage": usage_of_chat(event)}

    def _object(self, answer: HttpAnswer, text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        head = {"id": f"cmpl-{answer.request_id}", "object": "text_completion", "created": int(time.time())}
        return {**head, "model": self._context.model, "choices": [choice]}

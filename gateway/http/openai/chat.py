"""``/v1/chat/completions``."""

import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.answer import HEADERS_WITHIN_S, Answer, begin, finish_reason, usage_of
from gateway.http.body import read_body
from gateway.http.connection import while_connected
from gateway.http.context import HttpContext
from gateway.http.errors import json_response
from gateway.http.openai.chat_request import ChatOptions, read_chat
from gateway.http.streams import EventStream
from omnirelay.events import AudioEvent, TextEvent

NAMES: Final[Mapping[str, str | None]] = {"speaker": "audio.voice", "text_sampling.min_tokens": "min_tokens"}
"""What is called otherwise here than in a :class:`omnirelay.protocol.GenerateRequest`."""


class ChatApi:
    """The endpoint.

    Args:
        context: The gateway's parts.
    """

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Answer a conversation.

        Raises:
            OmniRelayError: The request is refused, or failed.
            ClientGoneError: The client did not wait.
        """
        context = self._context
        limits, media = context.config.gateway.limits, context.config.media
        read = partial(read_chat, max_text_tokens=limits.max_text_tokens, max_item_bytes=media.max_item_bytes)
        options, asked = await read_body(request, context, read)
        context.require_model(options.model)
        account = context.account(request)
        within_s = HEADERS_WITHIN_S if options.stream else None
        beginning = begin(context.gateway, asked, account, request, NAMES, headers_within_s=within_s)
        # The gateway's from here on: files must be let go of when the request ends, not when it is answered.
        del asked
        answer = await beginning
        completion = Completion(context, options, answer)
        if options.stream:
            return EventStream(completion.chunks(), answer, context.told)
        try:
            async with while_connected(request.receive):
                return json_response(await completion.whole(), headers=answer.headers)
        finally:
            answer.close()


class Completion:
    """One answer in OpenAI's form.

    Args:
        context: The gateway's parts.
        options: What it has to look like.
        answer: Its events.
    """

    def __init__(self, context: HttpContext, options: ChatOptions, answer: Answer) -> None:
        self._answer = answer
        self._options = options
        self._model = context.model
        self._created = int(time.time())
        self._audio = (
            context.audio.start(options.audio, streamed=options.stream, base64=True)
            if options.audio
            else None
        )

    async def whole(self) -> dict[str, Any]:
        """Give the whole answer, when it is complete."""
        pieces: list[bytes] = []
        async for event in self._answer:
            if isinstance(event, AudioEvent) and self._audio is not None:
                pieces.append(await self._audio.push(event.pcm))
            elif not isinstance(event, TextEvent | AudioEvent):
                done = event
        message: dict[str, Any] = {"role": "assistant", "content": done.text, "refusal": None}
        if self._audio is not None:
            pieces.append(await self._audio.finish())
            audio = {**self._audio_end(), "data": b"".join(pieces).decode(), "transcript": done.text}
            message |= {"content": None, "audio": audio}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(done)}
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage_of(done)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Give the answer piece by piece; nothing before something of it is there."""
        await self._answer.begin()
        yield self._chunk({"role": "assistant", "content": None if self._audio else "", "refusal": None})
        async for event in self._answer:
            if isinstance(event, TextEvent):
                if event.text:
                    spoken = {"audio": {**self._audio_id(), "transcript": event.text}}
                    yield self._chunk(spoken if self._audio else {"content": event.text})
            elif not isinstance(event, AudioEvent):
                done = event
            elif self._audio is not None and (data := await self._audio.push(event.pcm)):
                yield self._chunk({"audio": {**self._audio_id(), "data": data.decode()}})
        if self._audio is not None:
            if data := await self._audio.finish():
                yield self._chunk({"audio": {**self._audio_id(), "data": data.decode()}})
            yield self._chunk({"audio": self._audio_end()})
        yield self._chunk({}, finish_reason(done))
        if self._options.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_of(done)}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self._answer.request_id}"
        return {"id": name, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self._options.include_usage else chunk

    def _audio_id(self) -> dict[str, str]:
        return {"id": f"audio_{self._answer.request_id}"}

    def _audio_end(self) -> dict[str, Any]:
        # Nothing is kept that the id could stand for later.
        return {**self._audio_id(), "expires_at": self._created}

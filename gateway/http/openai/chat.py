"""``/v1/chat/completions``."""

import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.answer import HttpAnswer, begin, finish_reason, usage_of
from gateway.http.connection import while_connected
from gateway.http.context import HttpContext
from gateway.http.errors import json_response
from gateway.http.openai.chat_request import ChatAnswerOptions, read_chat
from gateway.http.streams import EventStream
from omnirelay.events import AudioEvent, DoneEvent, TextEvent

NAMES: Final[Mapping[str, str | None]] = {"speaker": "audio.voice", "text_sampling.min_tokens": "min_tokens"}
"""Names here of fields of a :class:`omnirelay.protocol.GenerateRequest`, where they differ."""


class ChatApi:
    """The endpoint."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Answer a conversation; errors are those of :func:`gateway.http.answer.begin`."""
        context = self._context
        limits, media = context.config.gateway.limits, context.config.media
        read = partial(read_chat, max_text_tokens=limits.max_text_tokens, max_item_bytes=media.max_item_bytes)
        options, answer = await begin(context, request, read, NAMES)
        completion = Completion(context, options, answer)
        if options.events:
            return EventStream(completion.chunks(), answer, context.told)
        try:
            async with while_connected(request.receive):
                return json_response(await completion.whole(), headers=answer.headers)
        finally:
            answer.close()


class Completion:
    """An answer in OpenAI's form."""

    def __init__(self, context: HttpContext, options: ChatAnswerOptions, answer: HttpAnswer) -> None:
        self._answer = answer
        self._options = options
        self._model = context.model
        self._created = int(time.time())
        self._audio = (
            context.audio.start(options.audio, streamed=options.events, base64=True)
            if options.audio
            else None
        )

    async def whole(self) -> dict[str, Any]:
        """Wait for the end of the answer, and return it as one object."""
        pieces: list[bytes] = []
        async for event in self._answer:
            if isinstance(event, AudioEvent) and self._audio is not None:
                pieces.append(await self._audio.push(event.pcm))
            elif isinstance(event, DoneEvent):
                done = event
        message: dict[str, Any] = {"role": "assistant", "content": done.text, "refusal": None}
        if self._audio is not None:
            pieces.append(await self._audio.finish())
            audio = {**self._audio_end(), "data": b"".join(pieces).decode(), "transcript": done.text}
            message |= {"content": None, "audio": audio}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason(done)}
        return {**self._head("chat.completion"), "choices": [choice], "usage": _usage(done)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer in chunks, the first one when there is something of it."""
        await self._answer.begin()
        yield self._chunk({"role": "assistant", "content": None if self._audio else "", "refusal": None})
        async for event in self._answer:
            if isinstance(event, TextEvent):
                if event.text:
                    yield self._chunk(
                        self._audio_delta(transcript=event.text) if self._audio else {"content": event.text}
                    )
            elif not isinstance(event, AudioEvent):
                done = event
            elif self._audio is not None and (data := await self._audio.push(event.pcm)):
                yield self._chunk(self._audio_delta(data=data.decode()))
        if self._audio is not None:
            if data := await self._audio.finish():
                yield self._chunk(self._audio_delta(data=data.decode()))
            yield self._chunk({"audio": self._audio_end()})
        yield self._chunk({}, finish_reason(done))
        if self._options.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": _usage(done)}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self._answer.request_id}"
        return {"id": name, "object": kind, "created": self._created, "model": self._model}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return {**chunk, "usage": None} if self._options.include_usage else chunk

    def _audio_delta(self, **fields: str) -> dict[str, Any]:
        return {"audio": {"id": f"audio_{self._answer.request_id}", **fields}}

    def _audio_end(self) -> dict[str, Any]:
        # Expired at once: the gateway keeps no audio for later turns.
        return {"id": f"audio_{self._answer.request_id}", "expires_at": self._created}


def _usage(done: DoneEvent) -> dict[str, Any]:
    return usage_of(done, "prompt", "completion", "tokens_details")

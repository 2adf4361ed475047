"""``/v1/chat/completions``."""

import asyncio
import binascii
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.answer import HttpAnswer, begin, finish_reason, reading, start_delay, tokens_of, usage_of
from gateway.http.context import Api, HttpContext
from gateway.http.encoding.encoders import EncodedAudio
from gateway.http.errors import json_response
from gateway.http.openai.chat_request import ChatAnswerOptions, read_chat
from gateway.http.openai.kept_answers import KeptAnswers
from gateway.http.openai.messages import call_object
from gateway.http.openai.strings import parse
from gateway.http.streams import EventStream
from omnirelay.events import AcceptedEvent, AudioEvent, CodecEvent, DoneEvent, Event, TextEvent
from omnirelay.protocol import GenerateRequest, partial_fields
from omnirelay.tasks import all_of
from omnirelay.tools import Call

NAMES: Final[Mapping[str, str | None]] = {
    "speaker": "audio.voice",
    **{
        f"text_sampling.{name}": name
        for name in ("min_tokens", "presence_penalty", "frequency_penalty", "min_p", "logit_bias")
    },
    "text_sampling.logprobs": "top_logprobs",
    "text_sampling.json_schema": "response_format",
}
"""Names here of fields of a :class:`omnirelay.protocol.GenerateRequest`, where they differ."""
MAX_SPOKEN_BYTES: Final = 4 * 2**20
"""Texts of earlier spoken answers that are kept, of all clients together."""


class ChatApi(Api):
    """The endpoint."""

    def __init__(self, context: HttpContext) -> None:
        super().__init__(context)
        # Their texts: the thinker's prompt has no audio of its own answers.
        self._spoken = KeptAnswers[str](MAX_SPOKEN_BYTES)

    async def create(self, request: Request) -> Response:
        """Answer a conversation; errors are those of :func:`gateway.http.answer.begin`."""
        context = self._context
        client = context.share(request)
        kept = partial(self._spoken.get, client)

        def read(body: bytearray) -> tuple[ChatAnswerOptions, GenerateRequest]:
            return read_chat(parse(body, context.max_item_bytes), context.max_text_tokens, kept)

        options, answers = await begin(context, request, read, NAMES)
        keep = partial(self._spoken.keep, client)
        completions = [Completion(context, options, answer, keep) for answer in answers]
        if options.events:
            return stream_of(context, answers, [completion.chunks() for completion in completions])
        return await whole_of(request, answers, [completion.whole() for completion in completions])


@dataclass(eq=False)
class Completion:
    """An answer in OpenAI's form.

    Attributes:
        _keep: Keeps the text of a spoken answer under the id of its audio; returns until when.
    """

    _context: HttpContext
    _options: ChatAnswerOptions
    _answer: HttpAnswer
    _keep: Callable[[str, str, int], int]
    _created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        options = self._options
        self._calls = options.call_parser()
        self._prompts = self._context.gateway.prompts
        self._audio = (
            # The base64 of a resumable answer is whole in each chunk.
            EncodedAudio(
                self._context.audio, options.audio, streamed=options.events, base64=not options.resumable
            )
            if options.audio
            else None
        )

    async def whole(self) -> dict[str, Any]:
        """Wait for the end of the answer, and return it as one object."""
        pieces: list[bytes] = []
        logprobs: list[dict[str, Any]] = []
        async for event in self._answer:
            if isinstance(event, TextEvent):
                logprobs += self._logprobs(event)
            if isinstance(event, AudioEvent) and self._audio is not None:
                pieces.append(await self._audio.push(event.pcm))
            elif isinstance(event, DoneEvent):
                done = event
        text, calls = self._split(done.text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": calls}
        if self._audio is not None:
            pieces.append(await self._audio.finish())
            audio = {**self._audio_end(done), "data": b"".join(pieces).decode(), "transcript": done.text}
            message |= {"content": None, "audio": audio}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._content(logprobs),
            "finish_reason": self._finish_reason(done),
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": usage_of_chat(done)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the answer in chunks, the first one when there is something of it."""
        await self._answer.begin()
        first = self._chunk({"role": "assistant", "content": None if self._audio else "", "refusal": None})
        yield first | self._told(AcceptedEvent(request_id=self._answer.request_id, seed=self._answer.seed))
        delay: dict[str, Any] = {}
        async for event in self._answer:
            if isinstance(event, TextEvent):
                logprobs = self._logprobs(event)
                told = self._told(event)
                for delta in self._text_deltas(event.text, bool(logprobs or told)):
                    yield self._chunk(delta, logprobs=logprobs) | told
                    logprobs, told = [], {}
            elif isinstance(event, CodecEvent):
                yield self._chunk({}) | self._told(event)
            elif isinstance(event, DoneEvent):
                done = event
            elif self._audio is not None:
                delay |= start_delay(event)
                if data := await self._audio.push(event.pcm):
                    yield self._chunk(self._audio_delta(data=self._text_of(data), **delay)) | self._told(
                        event
                    )
                    delay = {}
        for delta in [*await self._last_audio(done), *self._text_deltas("", last=True)]:
            yield self._chunk(delta)
        yield self._chunk({}, self._finish_reason(done))
        if self._options.usage.include_usage:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": usage_of_chat(done)}

    async def _last_audio(self, done: DoneEvent) -> list[dict[str, Any]]:
        if self._audio is None:
            return []
        data = await self._audio.finish()
        ending = {"audio": self._audio_end(done)}
        return [self._audio_delta(data=self._text_of(data)), ending] if data else [ending]

    def _text_of(self, data: bytes) -> str:
        """Give what the encoder returned as base64."""
        return (binascii.b2a_base64(data, newline=False) if self._options.resumable else data).decode()

    def _told(self, event: Event) -> dict[str, Any]:
        """Return what a client must add to its partial answer; nothing unless it asked for it."""
        told = partial_fields(event) if self._options.resumable else {}
        return {"resume": told} if told else {}

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"chatcmpl-{self._answer.request_id}"
        return {"id": name, "object": kind, "created": self._created, "model": self._context.model}

    def _logprobs(self, event: TextEvent) -> list[dict[str, Any]]:
        """Describe the tokens of an event that have a text, each with the likeliest in its place."""
        if not self._options.logprobs:
            return []
        pairs = zip(event.token_ids, event.logprobs, strict=False)
        return [
            self._token(token_id, each.logprob)
            | {"top_logprobs": [self._token(*likely) for likely in each.top]}
            for token_id, each in pairs
            if not self._prompts.is_special(token_id)
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._prompts.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": logprob, "bytes": list(data)}

    def _content(self, logprobs: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": logprobs, "refusal": None} if self._options.logprobs else None

    def _chunk(
        self, delta: dict[str, Any], reason: str | None = None, logprobs: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        content = self._content(list(logprobs)) if logprobs else None
        choice = {"index": 0, "delta": delta, "logprobs": content, "finish_reason": reason}
        chunk = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._audio is not None:
            # vLLM-Omni's benchmark tells text from speech by it.
            chunk["modality"] = "audio" if delta.get("audio", {}).get("data") else "text"
        return chunk | running_usage(self._context, self._options, self._answer)

    def _text_deltas(self, text: str, always: bool = False, last: bool = False) -> list[dict[str, Any]]:
        """Return what a piece of the text brings; ``always`` something."""
        numbers = count(self._calls.calls)
        deltas = [
            self._call_delta(next(numbers), each) if isinstance(each, Call) else self._said(each)
            for each in self._calls.push(text, last)
        ]
        return deltas or ([self._said("")] if always else [])

    def _said(self, text: str) -> dict[str, Any]:
        return {"content": text} if self._audio is None else self._audio_delta(transcript=text)

    def _call_delta(self, number: int, call: Call) -> dict[str, Any]:
        return {"tool_calls": [{"index": number, **call_object(self._answer.request_id, number, call)}]}

    def _split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """Return a whole answer's text, and its calls."""
        found = self._calls.push(text, last=True)
        calls = [each for each in found if isinstance(each, Call)]
        said = "".join(each for each in found if isinstance(each, str))
        return said, [call_object(self._answer.request_id, *each) for each in enumerate(calls)]

    def _finish_reason(self, done: DoneEvent) -> str:
        reason = finish_reason(done)
        return "tool_calls" if reason == "stop" and self._calls.calls else reason

    def _audio_delta(self, **fields: Any) -> dict[str, Any]:
        return {"audio": {"id": self._audio_id, **fields}}

    def _audio_end(self, done: DoneEvent) -> dict[str, Any]:
        return {
            "id": self._audio_id,
            "expires_at": self._keep(self._audio_id, done.text, len(done.text.encode())),
        }

    @property
    def _audio_id(self) -> str:
        return f"audio_{self._answer.request_id}"


def usage_of_chat(done: DoneEvent) -> dict[str, Any]:
    """Build ``usage`` with a chat's names."""
    return usage_of(done, "prompt", "completion", "tokens_details")


def running_usage(context: HttpContext, options: ChatAnswerOptions, answer: HttpAnswer) -> dict[str, Any]:
    """Build the field ``usage`` of a chunk: null, or the tokens that the stages have sent, if asked for."""
    if not options.usage.include_usage:
        return {}
    report = context.gateway.report(answer.request_id) if options.usage.continuous_usage_stats else None
    if report is None:
        return {"usage": None}
    written = report.text_tokens + report.codec_tokens
    return {"usage": tokens_of(report.prompt_tokens, written, "prompt", "completion")}


Chunks = AsyncGenerator[dict[str, Any], None]


def stream_of(context: HttpContext, answers: Sequence[HttpAnswer], streams: Sequence[Chunks]) -> EventStream:
    """Build the response that streams the chunks of all choices."""
    stream = merged(streams) if len(streams) > 1 else streams[0]
    return EventStream(stream, answers, context.told)


async def whole_of(
    request: Request, answers: Sequence[HttpAnswer], wholes: Sequence[Coroutine[Any, Any, dict[str, Any]]]
) -> Response:
    """Wait for all choices, and build the response of them; ClientGoneError if the client disconnects."""
    async with reading(request.receive, *answers):
        return json_response(joined(await all_of(wholes)), headers=answers[0].headers)


def joined(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return whole answers of one choice each as one of all choices."""
    choices = [{**each["choices"][0], "index": at} for at, each in enumerate(objects)]
    return {**objects[0], "choices": choices, "usage": summed([each["usage"] for each in objects])}


def summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a chat's ``usage`` of all choices: the prompt counts once, as in OpenAI's API."""
    details = [usage["completion_tokens_details"] for usage in usages]
    written = sum(usage["completion_tokens"] for usage in usages)
    return {
        **usages[0],
        "completion_tokens": written,
        "total_tokens": usages[0]["prompt_tokens"] + written,
        "completion_tokens_details": {name: sum(each[name] for each in details) for name in details[0]},
    }


async def merged(streams: Sequence[Chunks]) -> Chunks:
    """Yield the chunks of all choices as they come, under one id; the usage, which ends each, is summed.

    Raises:
        OmniRelayError: A choice failed; the others are not waited for.
    """
    head: dict[str, Any] = {}
    ends: list[dict[str, Any]] = []
    coming = {asyncio.ensure_future(anext(stream, None)): at for at, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=coming.__getitem__):
                at, chunk = coming.pop(task), task.result()
                if chunk is None:
                    continue
                coming[asyncio.ensure_future(anext(streams[at], None))] = at
                head = head or {name: chunk[name] for name in ("id", "created")}
                if chunk["choices"]:
                    yield {**chunk, **head, "choices": [{**each, "index": at} for each in chunk["choices"]]}
                else:
                    ends.append(chunk)
        if ends:
            yield {**ends[0], **head, "usage": summed([each["usage"] for each in ends])}
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

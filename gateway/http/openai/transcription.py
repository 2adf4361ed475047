"""``/v1/audio/transcriptions``: speech to text by the thinker, which is asked to transcribe."""

import io
import struct
import wave
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.http.answer import (
    AnswerOptions,
    HttpAnswer,
    begin,
    finish_reason,
    reading,
    usage_of,
    usage_of_transcript,
)
from gateway.http.context import Api
from gateway.http.errors import json_response
from gateway.http.fields import read_fields
from gateway.http.multipart import read_form
from gateway.http.streams import EventStream
from omnirelay.content import AudioPart, ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError, MediaTooLargeError, UnsupportedError
from omnirelay.events import DoneEvent, TextEvent
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from omnirelay.values import TRANSCRIPTION_PROMPT
from shared.messages import Seed, Temperature

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "chunking_strategy": ("auto",),
    "include[]": ([],),
    "timestamp_granularities[]": ([],),
}
"""Fields that are accepted with these values only."""
TIMED: Final = frozenset({"srt", "vtt"})
NAMES: Final[Mapping[str, str | None]] = {"messages": "file"}
"""Names here of fields of a :class:`omnirelay.protocol.GenerateRequest`, where they differ."""
MAX_HEAD_BYTES: Final = 2**16
"""Of a WAV file, before its samples; the length of one with more is not told."""
TRANSLATION_PROMPT: Final = "Translate the speech into English text. Output the text only."
JSON_VALUES: Final = (
    "temperature",
    "stream",
    "seed",
    "max_completion_tokens",
    "stream_include_usage",
    "stream_continuous_usage_stats",
)
"""Fields of a form that are not texts."""


class TranscriptionFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured, besides the file.

    Attributes:
        model: As in a chat.
        language: Ignored, but returned by ``verbose_json``.
        prompt: The system message: names, or what the recording is about.
        response_format: ``json``, ``text`` or ``verbose_json``. ``srt`` and ``vtt`` are refused: the model
            gives no times of words.
        temperature: As in a chat.
        stream: Events ``transcript.text.delta``, then ``transcript.text.done`` with ``usage``.
        seed: Default: random.
        max_completion_tokens: Most text tokens.
        stream_include_usage: vLLM's: makes the events chunks as in a chat; if true, they end with the usage.
        stream_continuous_usage_stats: Ignored.
    """

    model: str
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Temperature | None = None
    stream: bool = False
    seed: Seed | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool = False


@dataclass(frozen=True)
class TranscriptionOptions(AnswerOptions):
    """How a client wants its transcript.

    Attributes:
        fields: As the client gave them.
        duration: Seconds of the recording, if it is a WAV file.
        translated: Into English.
    """

    fields: TranscriptionFields
    duration: float | None
    translated: bool = False


def read_transcription(
    content_type: str, max_item_bytes: int, body: bytearray, prompt: str = TRANSCRIPTION_PROMPT
) -> tuple[TranscriptionOptions, GenerateRequest]:
    """Parse and check a form.

    Raises:
        InvalidRequestError: It is invalid, or asks for something that is not supported.
        MediaTooLargeError: The file is.
    """
    form = read_form(content_type, body)
    values = {name: _value(name, value) for name, value in form.values.items()}
    fields = read_fields(values, TranscriptionFields, NEUTRAL)
    if fields.response_format in TIMED:
        raise UnsupportedError(
            f"{fields.response_format} is not supported: the model does not tell when a word was said",
            "response_format",
        )
    if form.files.keys() != {"file"}:
        raise InvalidRequestError("the form needs one file, with the name 'file'", "file")
    data = form.files["file"]
    if len(data) > max_item_bytes:
        problem = f"the file has {len(data)} bytes, at most {max_item_bytes} are allowed"
        raise MediaTooLargeError(problem, "file")
    messages = [ChatMessage("user", [AudioPart(data=memoryview(data)), TextPart(prompt)])]
    if fields.prompt:
        messages.insert(0, ChatMessage("system", fields.prompt))
    request = GenerateRequest(
        messages=messages,
        speech=False,
        text_sampling=SamplingOverrides(
            temperature=fields.temperature, max_tokens=fields.max_completion_tokens
        ),
        seed=fields.seed,
    )
    translated = prompt == TRANSLATION_PROMPT
    return TranscriptionOptions(fields.model, fields.stream, fields, _seconds(data), translated), request


class TranscriptionApi(Api):
    """The endpoint."""

    async def create(self, request: Request) -> Response:
        """Transcribe a file; errors are those of :func:`gateway.http.answer.begin`."""
        return await self._answer(request, TRANSCRIPTION_PROMPT)

    async def translate(self, request: Request) -> Response:
        """Write in English what is said in a file; errors are those of :meth:`create`."""
        return await self._answer(request, TRANSLATION_PROMPT)

    async def _answer(self, request: Request, prompt: str) -> Response:
        context = self._context
        read = partial(
            read_transcription, request.headers.get("content-type", ""), context.max_item_bytes, prompt=prompt
        )
        options, [answer] = await begin(context, request, read, NAMES)
        if options.events:
            # Only vLLM's clients, which read chunks of a chat, say whether these end with a usage.
            usage = options.fields.stream_include_usage
            events = _events(answer) if usage is None else _chunks(answer, usage, context.model)
            return EventStream(events, [answer], context.told)
        async with reading(request.receive, answer):
            done = await answer.last()
        if options.fields.response_format == "text":
            return PlainTextResponse(done.text + "\n", headers=answer.headers)
        return json_response(_transcript(options, done), headers=answer.headers)


async def _events(answer: HttpAnswer) -> AsyncGenerator[dict[str, Any], None]:
    async for event in answer:
        if isinstance(event, TextEvent) and event.text:
            yield {"type": "transcript.text.delta", "delta": event.text}
        elif isinstance(event, DoneEvent):
            yield {"type": "transcript.text.done", "text": event.text, "usage": usage_of_transcript(event)}


async def _chunks(answer: HttpAnswer, usage: bool, model: str) -> AsyncGenerator[dict[str, Any], None]:
    head = {"id": f"trsc-{answer.request_id}", "object": "transcription.chunk", "model": model}
    async for event in answer:
        reason = finish_reason(event) if isinstance(event, DoneEvent) else None
        if (isinstance(event, TextEvent) and event.text) or reason:
            delta = {"content": event.text} if isinstance(event, TextEvent) else {}
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        if isinstance(event, DoneEvent) and usage:
            yield {**head, "choices": [], "usage": usage_of(event, "prompt", "completion", "tokens_details")}


def _transcript(options: TranscriptionOptions, done: DoneEvent) -> dict[str, Any]:
    if options.fields.response_format == "json":
        return {"text": done.text, "usage": usage_of_transcript(done)}
    seconds = options.duration
    about = {"task": "transcribe", "language": options.fields.language}
    if options.translated:
        about = {"task": "translate", "language": "english"}
    return {
        **about,
        "duration": seconds,
        "segments": [],
        "text": done.text,
        "usage": usage_of_transcript(done) if seconds is None else {"type": "duration", "seconds": seconds},
    }


def _value(name: str, value: Any) -> Any:
    if name not in JSON_VALUES:
        return value
    try:
        # Programs in Python write True and False.
        return msgspec.json.decode(value.lower() if value in ("True", "False") else value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"{name}: {value[:64]!r} is not a value: {error}", name) from error


def _seconds(data: bytes) -> float | None:
    """Return the length of a WAV file; none for others, which the thinker decodes or refuses."""
    # Chunk after chunk is read until the samples: millions of empty ones would take minutes.
    buffer = io.BytesIO(memoryview(data)[:MAX_HEAD_BYTES])
    try:
        with wave.open(buffer) as file:
            # It stands at the samples; encoders that stream claim more than there are.
            there = (len(data) - buffer.tell()) // (file.getnchannels() * file.getsampwidth())
            return min(file.getnframes(), there) / file.getframerate()
    except (wave.Error, EOFError, ArithmeticError, ValueError, RuntimeError, struct.error):
        return None

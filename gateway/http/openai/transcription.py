"""``/v1/audio/transcriptions``: speech to text by the thinker, which is asked to transcribe."""

import io
import struct
import wave
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from gateway.http.answer import AnswerOptions, HttpAnswer, begin, usage_of
from gateway.http.context import HttpContext
from gateway.http.errors import json_response
from gateway.http.fields import read_fields
from gateway.http.multipart import read_form
from gateway.http.streams import EventStream
from omnirelay.content import AudioPart, ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError, MediaTooLargeError, UnsupportedError
from omnirelay.events import DoneEvent, TextEvent
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from shared.config.gateway import TRANSCRIPTION_PROMPT
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
JSON_VALUES: Final = ("temperature", "stream", "seed")
"""Fields of a form that are not texts."""


class TranscriptionFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured, besides the file."""

    model: str
    language: str | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Temperature | None = None
    stream: bool = False
    seed: Seed | None = None


@dataclass(frozen=True)
class TranscriptionOptions(AnswerOptions):
    """How a client wants its transcript.

    Attributes:
        language: As the client gave it.
        duration: Seconds of the recording, if it is a WAV file.
    """

    format: str
    language: str | None
    duration: float | None


def read_transcription(
    content_type: str, max_item_bytes: int, body: bytearray
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
    messages = [ChatMessage("user", [AudioPart(data=memoryview(data)), TextPart(TRANSCRIPTION_PROMPT)])]
    if fields.prompt:
        messages.insert(0, ChatMessage("system", fields.prompt))
    request = GenerateRequest(
        messages=messages,
        speech=False,
        text_sampling=SamplingOverrides(temperature=fields.temperature),
        seed=fields.seed,
    )
    options = TranscriptionOptions(
        fields.model, fields.stream, fields.response_format, fields.language, _seconds(data)
    )
    return options, request


class TranscriptionApi:
    """The endpoint."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Transcribe a file; errors are those of :func:`gateway.http.answer.begin`."""
        context = self._context
        read = partial(
            read_transcription, request.headers.get("content-type", ""), context.config.media.max_item_bytes
        )
        options, answer = await begin(context, request, read, NAMES)
        if options.events:
            return EventStream(_events(answer), answer, context.told)
        done = await answer.end(request.receive)
        if options.format == "text":
            return PlainTextResponse(done.text + "\n", headers=answer.headers)
        return json_response(_transcript(options, done), headers=answer.headers)


async def _events(answer: HttpAnswer) -> AsyncGenerator[dict[str, Any], None]:
    async for event in answer:
        if isinstance(event, TextEvent) and event.text:
            yield {"type": "transcript.text.delta", "delta": event.text}
        elif isinstance(event, DoneEvent):
            yield {"type": "transcript.text.done", "text": event.text, "usage": _usage(event)}


def _transcript(options: TranscriptionOptions, done: DoneEvent) -> dict[str, Any]:
    if options.format == "json":
        return {"text": done.text, "usage": _usage(done)}
    seconds = options.duration
    return {
        "task": "transcribe",
        "language": options.language,
        "duration": seconds,
        "segments": [],
        "text": done.text,
        "usage": _usage(done) if seconds is None else {"type": "duration", "seconds": seconds},
    }


def _usage(done: DoneEvent) -> dict[str, Any]:
    return {"type": "tokens", **usage_of(done, "input", "output", "token_details")}


def _value(name: str, value: Any) -> Any:
    if name not in JSON_VALUES:
        return value
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"{name}: {value[:64]!r} is not a value: {error}", name) from error


def _seconds(data: bytes) -> float | None:
    """Return the length of a WAV file; none for others, which the thinker decodes or refuses."""
    buffer = io.BytesIO(data)
    try:
        with wave.open(buffer) as file:
            # It stands at the samples; encoders that stream claim more than there are.
            there = (len(data) - buffer.tell()) // (file.getnchannels() * file.getsampwidth())
            return min(file.getnframes(), there) / file.getframerate()
    except (wave.Error, EOFError, ArithmeticError, ValueError, RuntimeError, struct.error):
        return None

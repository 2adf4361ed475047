"""``/v1/audio/speech``: text to speech, as far as a model that answers can be made to repeat."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway.http.answer import HEADERS_WITHIN_S, Answer, begin, usage_of
from gateway.http.body import read_body, read_object
from gateway.http.context import HttpContext
from gateway.http.encoding.encoders import CONTENT_TYPES, AudioFormat, require_format
from gateway.http.fields import read_fields, require_one_of
from gateway.http.openai.chat_request import Voice, voice_name
from gateway.http.streams import ByteStream, EventStream
from omnirelay.content import ChatMessage
from omnirelay.errors import UnsupportedError
from omnirelay.events import AudioEvent, DoneEvent
from omnirelay.protocol import GenerateRequest
from shared.messages import Seed

MAX_CHARACTERS: Final = 4096
"""Of the text, as in OpenAI's API."""
REPEAT: Final = (
    "Repeat the user's message word for word, in its own language. Do not answer it, do not comment on it, "
    "and add nothing."
)
FORMATS: Final[Mapping[str, AudioFormat]] = {
    "mp3": "mp3",
    "opus": "opus",
    "aac": "aac",
    "flac": "flac",
    "wav": "wav",
    "pcm": "pcm16",
}
"""OpenAI's names here, and ours."""
NAMES: Final[Mapping[str, str | None]] = {"speaker": "voice", "messages": "input"}
"""What is called otherwise here than in a :class:`omnirelay.protocol.GenerateRequest`."""


class SpeechFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that are honoured."""

    model: str
    input: Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS)]
    voice: Voice | None = None
    instructions: Annotated[str, Meta(max_length=MAX_CHARACTERS)] = ""
    response_format: str = "mp3"
    stream_format: Literal["audio", "sse"] = "audio"
    speed: float = 1.0
    seed: Seed | None = None


@dataclass(frozen=True)
class SpeechOptions:
    """What the answer has to look like.

    Attributes:
        model: The name by which the client calls the model.
        format: Of the speech.
        events: Send it as events, not as a file.
    """

    model: str
    format: AudioFormat
    events: bool


def read_speech(body: bytearray, system_prompt: str | None) -> tuple[SpeechOptions, GenerateRequest]:
    """Read the body of a request.

    Args:
        body: JSON.
        system_prompt: What the model is told first, before it is told to repeat.

    Raises:
        InvalidRequestError: It is not one, or asks for what is not done here; ``param`` says where.
    """
    fields = read_fields(read_object(body), SpeechFields, neutral={})
    require_one_of("response_format", fields.response_format, FORMATS)
    name = FORMATS[fields.response_format]
    require_format(name, "response_format")
    if fields.speed != 1:
        raise UnsupportedError("speed is not supported: the model speaks as fast as it does", "speed")
    system = " ".join(filter(None, [system_prompt, REPEAT, fields.instructions]))
    request = GenerateRequest(
        messages=[ChatMessage("system", system), ChatMessage("user", fields.input)],
        speaker=voice_name(fields.voice),
        seed=fields.seed,
    )
    return SpeechOptions(fields.model, name, fields.stream_format == "sse"), request


class SpeechApi:
    """The endpoint.

    Args:
        context: The gateway's parts.
    """

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Speak a text.

        Raises:
            OmniRelayError: The request is refused, or failed.
            ClientGoneError: The client did not wait.
        """
        context = self._context
        read = partial(read_speech, system_prompt=context.config.gateway.speech_system_prompt)
        options, asked = await read_body(request, context, read)
        context.require_model(options.model)
        account = context.account(request)
        within_s = HEADERS_WITHIN_S if options.events else None
        answer = await begin(context.gateway, asked, account, request, NAMES, headers_within_s=within_s)
        if options.events:
            return EventStream(self._events(options, answer), answer, context.told)
        pieces = self._pieces(options, answer)
        return ByteStream(pieces, answer, context.told, CONTENT_TYPES[options.format])

    async def _pieces(self, options: SpeechOptions, answer: Answer) -> AsyncGenerator[bytes, None]:
        audio = self._context.audio.start(options.format, streamed=True)
        async for event in answer:
            if isinstance(event, AudioEvent) and (data := await audio.push(event.pcm)):
                yield data
        yield await audio.finish()

    async def _events(self, options: SpeechOptions, answer: Answer) -> AsyncGenerator[dict[str, Any], None]:
        audio = self._context.audio.start(options.format, streamed=True, base64=True)
        async for event in answer:
            if isinstance(event, AudioEvent) and (data := await audio.push(event.pcm)):
                yield _delta(data)
            if isinstance(event, DoneEvent):
                done = event
        if data := await audio.finish():
            yield _delta(data)
        usage = usage_of(done)
        tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        total = {"total_tokens": usage["total_tokens"]}
        yield {"type": "speech.audio.done", "usage": {**tokens, **total}}


def _delta(data: bytes) -> dict[str, str]:
    return {"type": "speech.audio.delta", "audio": data.decode()}

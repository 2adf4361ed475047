"""``/v1/audio/speech``: a text that is spoken as it is, in pieces."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from gateway.access.account import ClientAccount
from gateway.http.answer import AnswerEvent, AnswerOptions, HttpAnswer, begin, start_delay, usage_of
from gateway.http.body import read_object
from gateway.http.connection import while_connected
from gateway.http.context import ALIAS, Api
from gateway.http.encoding.encoders import CONTENT_TYPES, AudioFormat, EncodedAudio, require_format
from gateway.http.encoding.tempo import require_speed
from gateway.http.fields import read_fields, require_one_of
from gateway.http.openai.chat_request import Voice, voice_name
from gateway.http.streams import ByteStream, EventStream
from gateway.manager import Gateway
from omnirelay.content import ChatMessage
from omnirelay.errors import BusyError, StoppingError
from omnirelay.events import AudioEvent, DoneEvent
from omnirelay.protocol import GenerateRequest
from omnirelay.reading import one_ahead, pieces
from omnirelay.values import ChunkFrames
from shared.messages import Seed

PATIENCE_S: Final = 60.0
"""How long a piece waits for a place at a busy gateway."""
MAX_CHARACTERS: Final = 32_768
"""Of a text: more than half an hour of speech; OpenAI's API takes 4,096."""
MAX_INSTRUCTIONS: Final = 4096
START_DELAY: Final = "X-Start-Delay-Ms"
"""Header of a file: how long to wait before playing it."""
FORMATS: Final = {each.removesuffix("16"): each for each in CONTENT_TYPES}
"""The gateway's formats by OpenAI's names, of which only that of PCM is another."""
NAMES: Final[Mapping[str, str | None]] = {"speaker": "voice", "messages": "instructions", "say": "input"}
"""Names here of fields of a :class:`omnirelay.protocol.GenerateRequest`, where they differ."""


def read_aloud(
    gateway: Gateway,
    account: ClientAccount,
    requests: AsyncIterable[GenerateRequest],
    first: HttpAnswer | None = None,
) -> AsyncGenerator[AnswerEvent, None]:
    """Yield the events of ``first``, then those of each request; the last of each is a DoneEvent.

    Args:
        gateway: Serves the requests.
        account: Of the client.
        requests: One for each piece; asked for the next one when there is audio of the one before.
        first: The answer to a request that was submitted already.

    Raises:
        OmniRelayError: A request was refused, or failed.
    """

    async def answers() -> AsyncGenerator[HttpAnswer, None]:
        if first is not None:
            yield first
        async for request in requests:
            yield await _submitted(gateway, account, request)

    return one_ahead(answers(), HttpAnswer.close)


async def _submitted(gateway: Gateway, account: ClientAccount, request: GenerateRequest) -> HttpAnswer:
    """Submit a request, waiting for a place if the gateway is busy."""
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await HttpAnswer.to(gateway, request, account, NAMES)
        except BusyError as error:
            wait_s = error.retry_after_ms / 1000
            # A gateway that stops has no place again, and waits for what it sends.
            if isinstance(error, StoppingError) or asyncio.get_running_loop().time() + wait_s > until:
                raise
        await asyncio.sleep(wait_s)


class VoiceFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a text is spoken.

    Attributes:
        model: As in a chat.
        voice: As in a chat. Default: the default voice.
        instructions: Added to the end of the system message.
        response_format: ``mp3``, ``opus``, ``aac``, ``flac``, ``wav``, or ``pcm``
            (docs/api-speech.md#formats).
        speed: Without a change of pitch. Values other than 1 need PyAV.
        chunk_frames: As in a chat.
        seed: Default: random.
    """

    model: str = ALIAS
    voice: Voice | None = None
    instructions: Annotated[str, Meta(max_length=MAX_INSTRUCTIONS)] = ""
    response_format: str = "mp3"
    speed: Annotated[float, Meta(ge=0.25, le=4)] = 1.0
    chunk_frames: ChunkFrames = []
    seed: Seed | None = None

    def read(self, system_prompt: str | None) -> tuple[AudioFormat, GenerateRequest]:
        """The format, and a request without its text; ``system_prompt`` precedes the instructions.

        Raises:
            InvalidRequestError: Something is not supported.
        """
        require_one_of("response_format", self.response_format, FORMATS)
        require_format(FORMATS[self.response_format], "response_format")
        require_speed(self.speed, "speed")
        system = " ".join(filter(None, [system_prompt, self.instructions]))
        request = GenerateRequest(
            messages=[ChatMessage("system", system)] if self.instructions else [],
            speaker=voice_name(self.voice),
            chunk_frames=self.chunk_frames,
            seed=self.seed,
        )
        return FORMATS[self.response_format], request


class SpeechFields(VoiceFields, frozen=True, kw_only=True):
    """The fields of a request.

    Attributes:
        model: As in a chat.
        input: The text.
        stream_format: ``audio``: the file, streamed. ``sse``: events ``speech.audio.delta`` with ``audio`` in
            base64, then ``speech.audio.done`` with ``usage``.
    """

    model: str
    input: Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS)]
    stream_format: Literal["audio", "sse"] = "audio"


@dataclass(frozen=True)
class SpeechAnswerOptions(AnswerOptions):
    """How a client wants its speech; ``rest`` are the requests for what follows the first piece."""

    format: AudioFormat
    speed: float
    rest: Sequence[GenerateRequest]


def read_speech(body: bytearray, system_prompt: str | None) -> tuple[SpeechAnswerOptions, GenerateRequest]:
    """Parse and check a body; ``system_prompt`` precedes the instructions.

    Raises:
        InvalidRequestError: It is invalid, or asks for something that is not supported.
    """
    fields = read_fields(read_object(body), SpeechFields, neutral={})
    format_, request = fields.read(system_prompt)
    texts = [piece.strip() for piece in pieces(fields.input) if piece.strip()] or [""]
    first, *rest = (msgspec.structs.replace(request, say=text) for text in texts)
    options = SpeechAnswerOptions(fields.model, fields.stream_format == "sse", format_, fields.speed, rest)
    return options, first


class SpeechApi(Api):
    """The endpoint."""

    async def create(self, request: Request) -> Response:
        """Speak a text; errors are those of :func:`gateway.http.answer.begin`."""
        context = self._context
        read = partial(read_speech, system_prompt=context.gateway.validator.speech_system_prompt)
        options, [answer] = await begin(context, request, read, NAMES)
        account = context.account(request)
        events = read_aloud(context.gateway, account, _each(options.rest), answer)
        if options.events:
            return EventStream(self._events(options, events), [answer], context.told)
        try:
            async with while_connected(request.receive):
                delay_ms = await answer.begin_audio()
        except BaseException:
            answer.close()
            raise
        file = self._file(options, events)
        stream = ByteStream(file, [answer], context.told, CONTENT_TYPES[options.format])
        stream.headers[START_DELAY] = str(delay_ms)
        return stream

    async def _file(
        self, options: SpeechAnswerOptions, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        audio = EncodedAudio(self._context.audio, options.format, streamed=True, speed=options.speed)
        async with aclosing(events):
            async for event in events:
                if isinstance(event, AudioEvent) and (data := await audio.push(event.pcm)):
                    yield data
        yield await audio.finish()

    async def _events(
        self, options: SpeechAnswerOptions, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[dict[str, Any], None]:
        audio = EncodedAudio(
            self._context.audio, options.format, streamed=True, base64=True, speed=options.speed
        )
        delay: dict[str, int] = {}
        counts = Counter[str]()
        async with aclosing(events):
            async for event in events:
                if isinstance(event, AudioEvent):
                    # Later pieces come before the one that is played has ended.
                    delay |= {} if counts else start_delay(event)
                    if data := await audio.push(event.pcm):
                        yield _delta(data) | delay
                        delay = {}
                if isinstance(event, DoneEvent):
                    usage = usage_of(event, "input", "output", "token_details")
                    counts.update({name: usage[name] for name in usage if name.endswith("_tokens")})
        if data := await audio.finish():
            yield _delta(data)
        yield {"type": "speech.audio.done", "usage": counts}


async def _each(requests: Sequence[GenerateRequest]) -> AsyncGenerator[GenerateRequest, None]:
    for request in requests:
        yield request


def _delta(data: bytes) -> dict[str, Any]:
    return {"type": "speech.audio.delta", "audio": data.decode()}

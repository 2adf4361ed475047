"""WebSockets on ``/v1/audio/speech/stream``: a text is spoken while it grows, sentence by sentence.

Messages are those of vLLM-Omni's endpoint of that name: ``session.config``, ``input.text``, ``input.done``;
then ``audio.start``, binary audio and ``audio.done`` of each sentence, and ``session.done``.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final

import msgspec
from starlette.websockets import WebSocket

from gateway.http.body import parsed, read_object, size_of
from gateway.http.connection import NORMAL, JsonSocket, close, send
from gateway.http.context import Api, HttpContext
from gateway.http.encoding.encoders import AudioFormat, EncodedAudio
from gateway.http.errors import body_of
from gateway.http.fields import convert, read_fields
from gateway.http.guards import client_of
from gateway.http.openai.speech import MAX_CHARACTERS, VoiceFields, read_aloud
from omnirelay.errors import InvalidRequestError, OmniRelayError
from omnirelay.events import AudioEvent, DoneEvent
from omnirelay.protocol import GenerateRequest
from omnirelay.reading import growing_pieces
from omnirelay.tasks import first_of

IDLE_S: Final = 120.0
"""Time limit between two messages of a client, while nothing is spoken."""
MAX_WAITING: Final = 64
"""Messages with text that wait to be spoken; further ones are not read before."""


class _Config(VoiceFields, frozen=True, kw_only=True):
    response_format: str = "wav"


class _Text(msgspec.Struct, frozen=True):
    text: Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)] = ""


class SpeechSocket(Api):
    """The endpoint."""

    async def serve(self, socket: WebSocket) -> None:
        """Speak a text that grows, of one client."""
        await _Connection(socket, self._context).serve()


class _Connection(JsonSocket):
    """One client, and the texts that wait."""

    def __init__(self, socket: WebSocket, context: HttpContext) -> None:
        super().__init__(socket, context, IDLE_S)
        self._texts: asyncio.Queue[str | None] = asyncio.Queue(MAX_WAITING)
        # Pieces that were begun, and whose end was not sent.
        self._begun: deque[str] = deque()

    async def _converse(self) -> None:
        try:
            await self._take()
        except OmniRelayError as error:
            self._context.told(error)
            await self._send({"type": "error", **body_of(error)})
        await close(self._socket, NORMAL)

    async def _take(self) -> None:
        """Take the settings, then speak what comes."""
        client_of(self._socket.scope).check()
        kind, values = await self._message()
        if kind != "session.config":
            raise InvalidRequestError("the first message must be session.config", "type")
        config = read_fields(values, _Config, neutral={"split_granularity": ("sentence",)})
        self._context.require_model(config.model)
        audio_format, request = config.read(self._context.gateway.validator.speech_system_prompt)
        await first_of(self._read(), self._speak(request, audio_format, config))

    async def _read(self) -> None:
        """Take texts until the client disconnects."""
        while True:
            kind, values = await self._message()
            if kind == "input.text":
                text = convert(values, _Text).text
                self.hold.grow(size_of(text))
                await self._texts.put(text)
            elif kind == "input.done":
                await self._texts.put(None)
            else:
                raise InvalidRequestError(f"there is no message of type {kind[:64]!r} here", "type")

    async def _message(self) -> tuple[str, dict[str, Any]]:
        try:
            text = await self._next(lambda: bool(self._begun))
        except TimeoutError:
            raise InvalidRequestError(f"no message came for {IDLE_S:g} s") from None
        body = bytearray(text, "utf-8", "surrogatepass")
        values = await parsed(self._context, self.hold.client, read_object, body)
        if not isinstance(kind := values.pop("type", None), str):
            raise InvalidRequestError("a message is an object with a type", "type")
        return kind, values

    async def _requests(self, request: GenerateRequest) -> AsyncGenerator[GenerateRequest, None]:
        async def texts() -> AsyncGenerator[str, None]:
            while (text := await self._texts.get()) is not None:
                self.hold.shrink(size_of(text))
                yield text

        async for piece in growing_pieces(texts()):
            if said := piece.strip():
                self._begun.append(said)
                yield msgspec.structs.replace(request, say=said)

    async def _speak(self, request: GenerateRequest, audio_format: AudioFormat, config: VoiceFields) -> None:
        account = self._context.account(self._socket)
        events = read_aloud(self._context.gateway, account, self._requests(request))
        number, audio = 0, None
        async with aclosing(events):
            async for event in events:
                if audio is None:
                    told = {"sentence_text": self._begun[0], "format": config.response_format}
                    await self._send({"type": "audio.start", "sentence_index": number, **told})
                    audio = EncodedAudio(self._context.audio, audio_format, streamed=True, speed=config.speed)
                if isinstance(event, AudioEvent) and (data := await audio.push(event.pcm)):
                    await send(self._socket, data)
                if isinstance(event, DoneEvent):
                    if data := await audio.finish():
                        await send(self._socket, data)
                    await self._send({"type": "audio.done", "sentence_index": number})
                    self._begun.popleft()
                    number, audio = number + 1, None
        await self._send({"type": "session.done", "total_sentences": number})

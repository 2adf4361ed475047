"""The answer to one HTTP request: its events, and what both OpenAI endpoints do with it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.types import Receive

from gateway.access.account import ClientAccount
from gateway.http.body import read_body
from gateway.http.connection import while_connected
from gateway.http.context import HttpContext
from gateway.http.fields import named
from gateway.http.guards import REQUEST_ID
from gateway.manager import Gateway
from gateway.requests.response_stream import ResponseStream
from gateway.validation import SEED_BITS
from omnirelay import error_codes
from omnirelay.events import AcceptedEvent, AudioEvent, CodecEvent, DoneEvent, ErrorEvent, TextEvent
from omnirelay.protocol import GenerateRequest

HEADERS_WITHIN_S: Final = 5.0
"""When an event stream sends its headers even if its request is still queued: proxies give up on silent
upstreams.  Until then an error still sets the status."""

AnswerEvent = TextEvent | CodecEvent | AudioEvent | DoneEvent


@dataclass(frozen=True)
class AnswerOptions:
    """How a client wants its answer.

    Attributes:
        model: The client's name of the model.
        events: Send server-sent events while the answer is generated.
        choices: How many answers.
    """

    model: str
    events: bool
    choices: int = field(default=1, kw_only=True)


Options = TypeVar("Options", bound=AnswerOptions)


class HttpAnswer:
    """The events of a request, whose errors are raised with the client's names of fields.  Must be closed.

    Attributes:
        seed: Of a resumable request, once there is an event.
    """

    def __init__(self, stream: ResponseStream, names: Mapping[str, str | None]) -> None:
        self.request_id: Final = stream.request_id
        self.seed: int | None = None
        self._stream = stream
        self._names = names

    @classmethod
    async def to(
        cls,
        gateway: Gateway,
        request: GenerateRequest,
        account: ClientAccount,
        names: Mapping[str, str | None],
        near: str | None = None,
    ) -> "HttpAnswer":
        """Submit a request, as :meth:`gateway.manager.Gateway.submit`, and return its answer."""
        with named(names):
            return cls(await gateway.submit(request, account, near), names)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that identify the request."""
        return {"X-Request-Id": self.request_id}

    async def begin(self, most_s: float | None = None) -> None:
        """Wait up to ``most_s`` seconds for the first event, which iteration still returns."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._peek()

    async def begin_audio(self) -> int:
        """Wait for the first audio, which iteration still returns, without the text before it.

        Returns:
            How many milliseconds the client should wait before it plays.
        """
        while isinstance(event := await self._peek(), TextEvent):
            await anext(self._stream)
        return event.start_delay_ms if isinstance(event, AudioEvent) else 0

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        """Iterate over the events; the last one is a :class:`omnirelay.events.DoneEvent`."""
        ended = False
        while not ended:
            event = await self._peek()
            await anext(self._stream)
            ended = isinstance(event, DoneEvent)
            yield event

    async def last(self) -> DoneEvent:
        """Wait for the last event, without those before it."""
        async for event in self:
            if isinstance(event, DoneEvent):
                done = event
        return done

    def close(self) -> None:
        """Release the request, and cancel it if it has not ended."""
        self._stream.close()

    async def _peek(self) -> AnswerEvent:
        while isinstance(event := await self._stream.peek(), AcceptedEvent):
            self.seed = event.seed
            await anext(self._stream)
        if isinstance(event, ErrorEvent):
            with named(self._names):
                raise error_codes.from_event(event)
        return event


def close_all(answers: Iterable[HttpAnswer]) -> None:
    """Release the requests, and cancel those that have not ended."""
    for answer in answers:
        answer.close()


@asynccontextmanager
async def reading(receive: Receive, *answers: HttpAnswer) -> AsyncIterator[None]:
    """Cancel the block if the client disconnects, and close the answers behind it.

    Raises:
        ClientGoneError: The client disconnected.
    """
    try:
        async with while_connected(receive):
            yield
    finally:
        close_all(answers)


async def begin(
    context: HttpContext,
    http: Request,
    read: Callable[[bytearray], tuple[Options, GenerateRequest]],
    names: Mapping[str, str | None],
) -> tuple[Options, list[HttpAnswer]]:
    """Read a request and submit it for each choice; ``names`` are those of :func:`gateway.http.fields.named`.

    Raises:
        OmniRelayError: The request was refused, or failed before its first event.
        ClientGoneError: The client disconnected.
    """
    options, request = await read_body(http, context, read)
    context.require_model(options.model)
    # More than one is invalid.
    if len(traceparent := http.headers.getlist("traceparent")) == 1:
        request = msgspec.structs.replace(request, traceparent=traceparent[0])
    account = context.account(http)
    answers: list[HttpAnswer] = []
    async with while_connected(http.receive):
        try:
            for number in range(options.choices):
                choice = _seeded(request, number)
                answers.append(await HttpAnswer.to(context.gateway, choice, account, names))
            # Also in the header of an error that comes before the first event.
            http.scope[REQUEST_ID] = answers[0].request_id
            # The gateway frees media when the request ends, which may be before the answer is sent.
            del request
            # Without events an error can only be told by the status.
            most_s = HEADERS_WITHIN_S if options.events else None
            await asyncio.gather(*(answer.begin(most_s) for answer in answers))
        except BaseException:
            close_all(answers)
            raise
    return options, answers


def _seeded(request: GenerateRequest, number: int) -> GenerateRequest:
    """Return the request for a choice, whose seed is its own."""
    if not number or request.seed is None:
        return request
    return msgspec.structs.replace(request, seed=(request.seed + number) % 2**SEED_BITS)


def usage_of(done: DoneEvent, prompt: str, output: str, details: str) -> dict[str, Any]:
    """Build OpenAI's ``usage``, whose field names differ between its APIs."""
    text, codec = len(done.text_token_ids), len(done.codec_token_ids)
    counted = tokens_of(done.prompt_tokens or len(done.prompt_token_ids), text + codec, prompt, output)
    return {
        **counted,
        f"{prompt}_{details}": {"cached_tokens": done.cached_prompt_tokens},
        f"{output}_{details}": {"text_tokens": text, "audio_tokens": codec},
    }


def tokens_of(read: int, written: int, prompt: str, output: str) -> dict[str, int]:
    """Build the numbers of a ``usage``, without details."""
    return {f"{prompt}_tokens": read, f"{output}_tokens": written, "total_tokens": read + written}


def usage_of_transcript(done: DoneEvent) -> dict[str, Any]:
    """Build the ``usage`` of a transcript, whose prompt has one recording and no other media."""
    usage = usage_of(done, "input", "output", "token_details")
    audio = max(usage["input_tokens"] - len(done.prompt_token_ids) + 1, 0)
    usage["input_token_details"] |= {"audio_tokens": audio, "text_tokens": usage["input_tokens"] - audio}
    return {"type": "tokens", **usage}


def start_delay(event: AudioEvent) -> dict[str, int]:
    """Build the field that tells a client how long to wait before it plays; none if it need not."""
    return {"start_delay_ms": event.start_delay_ms} if event.start_delay_ms else {}


def finish_reason(done: DoneEvent) -> str:
    """Return ``length`` if the text or the speech was cut, else ``stop``."""
    return "length" if "length" in (done.finish_reason, done.codec_finish_reason) else "stop"

"""The answer to one HTTP request, on its way from the gateway."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request

from gateway.access.account import ClientAccount
from gateway.http.connection import while_connected
from gateway.http.fields import named
from gateway.manager import Gateway
from gateway.requests.response_stream import ResponseStream
from omnirelay import error_codes
from omnirelay.events import AcceptedEvent, AudioEvent, DoneEvent, ErrorEvent, TextEvent
from omnirelay.protocol import GenerateRequest

HEADERS_WITHIN_S: Final = 5.0
"""A stream of events sends its headers by then, also while its request waits in line: proxies give up what is
silent.  Until then an error still is the answer's status."""

AnswerEvent = TextEvent | AudioEvent | DoneEvent


class Answer:
    """The events of a request that say something; errors are raised.  Close it in any case.

    Args:
        stream: The gateway's.
        names: What the client calls the request's fields, see :func:`gateway.http.fields.named`.
    """

    def __init__(self, stream: ResponseStream, names: Mapping[str, str | None]) -> None:
        self.request_id: Final = stream.request_id
        self._stream = stream
        self._names = names
        self._first: asyncio.Future[AnswerEvent] | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers that name the request."""
        return {"X-Request-Id": self.request_id}

    async def begin(self, most_s: float | None = None) -> None:
        """Wait for the first event, for so long at most; it is still given.

        Raises:
            RequestError: The request ended with it.
        """
        if self._first is None:
            self._first = asyncio.ensure_future(self._next())
        await asyncio.wait([self._first], timeout=most_s)
        if self._first.done():
            self._first.result()

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        """Give the events, :class:`gateway.events.DoneEvent` last.

        Raises:
            RequestError: The request ended with it.
        """
        event = await (self._first or self._next())
        while True:
            yield event
            if isinstance(event, DoneEvent):
                return
            event = await self._next()

    def close(self) -> None:
        """Let go of the request; it is cancelled if it has not ended."""
        if self._first is not None and not self._first.cancel() and not self._first.cancelled():
            # An error that nobody waits for any more is no one's.
            self._first.exception()
        self._stream.close()

    async def _next(self) -> AnswerEvent:
        event = await anext(self._stream)
        while isinstance(event, AcceptedEvent):
            event = await anext(self._stream)
        if isinstance(event, ErrorEvent):
            with named(self._names):
                raise error_codes.from_event(event)
        return event


async def begin(
    gateway: Gateway,
    request: GenerateRequest,
    account: ClientAccount,
    http: Request,
    names: Mapping[str, str | None],
    *,
    headers_within_s: float | None = None,
) -> Answer:
    """Ask the gateway.

    Args:
        gateway: Answers.
        request: What is asked.
        account: Who asks.
        http: The request by HTTP, which tells when the client goes away, and whose trace it is part of.
        names: What the client calls the request's fields, see :func:`gateway.http.fields.named`.
        headers_within_s: How long to wait for the first event: an error until then still becomes the
            answer's status.  None waits for it; an answer that can tell errors itself need not.

    Raises:
        RequestError: The request is refused, or failed before anything came.
        ClientGoneError: The client went away.
    """
    # Two of them are as good as none.
    if len(traceparent := http.headers.getlist("traceparent")) == 1:
        request = msgspec.structs.replace(request, traceparent=traceparent[0])
    async with while_connected(http.receive):
        with named(names):
            answer = Answer(await gateway.submit(request, account), names)
        try:
            await answer.begin(headers_within_s)
        except BaseException:
            answer.close()
            raise
    return answer


def usage_of(done: DoneEvent) -> dict[str, Any]:
    """Give the numbers of tokens; of the speech, codec tokens are counted."""
    prompt = done.prompt_tokens or len(done.prompt_token_ids)
    text, codec = len(done.text_token_ids), len(done.codec_token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": text + codec,
        "total_tokens": prompt + text + codec,
        "prompt_tokens_details": {"cached_tokens": done.cached_prompt_tokens},
        "completion_tokens_details": {"text_tokens": text, "audio_tokens": codec},
    }


def finish_reason(done: DoneEvent) -> str:
    """Why the answer ended: ``length`` if the text or the speech was cut."""
    return "length" if "length" in (done.finish_reason, done.codec_finish_reason) else "stop"

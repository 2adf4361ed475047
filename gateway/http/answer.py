"""The answer to one HTTP request, on its way from the gateway."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request

from gateway import failures
from gateway.core import Gateway
from gateway.events import AcceptedEvent, AudioEvent, DoneEvent, ErrorEvent, TextEvent
from gateway.http.connection import while_connected
from gateway.http.fields import named
from gateway.protocol import GenerateRequest
from gateway.stream import ClientAccount, ResponseStream

AnswerEvent = TextEvent | AudioEvent | DoneEvent


class Answer:
    """The events of a request that say something; errors are raised.  Close it in any case.

    Args:
        stream: The gateway's.
        names: What the client calls the fields of the request, as for :func:`gateway.http.fields.named`.
    """

    def __init__(self, stream: ResponseStream, names: Mapping[str, str | None]) -> None:
        self.request_id: Final = stream.request_id
        self._stream = stream
        self._names = names
        self._first: AnswerEvent | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers that name the request."""
        return {"X-Request-Id": self.request_id}

    async def begin(self) -> None:
        """Wait for the first event; it is still given.

        Raises:
            RequestError: The request ended with it.
        """
        if self._first is None:
            self._first = await self._next()

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        """Give the events, :class:`gateway.events.DoneEvent` last.

        Raises:
            RequestError: The request ended with it.
        """
        event = self._first or await self._next()
        while True:
            yield event
            if isinstance(event, DoneEvent):
                return
            event = await self._next()

    def close(self) -> None:
        """Let go of the request; it is cancelled if it has not ended."""
        self._stream.close()

    async def _next(self) -> AnswerEvent:
        event = await anext(self._stream)
        while isinstance(event, AcceptedEvent):
            event = await anext(self._stream)
        if isinstance(event, ErrorEvent):
            with named(self._names):
                raise failures.from_event(event)
        return event


async def begin(
    gateway: Gateway,
    request: GenerateRequest,
    account: ClientAccount,
    http: Request,
    names: Mapping[str, str | None],
    *,
    wait: bool,
) -> Answer:
    """Ask the gateway.

    Args:
        gateway: Answers.
        request: What is asked.
        account: Who asks.
        http: The request by HTTP, which tells when the client goes away, and whose trace it is part of.
        names: What the client calls the fields of the request, as for :func:`gateway.http.fields.named`.
        wait: Wait for the first event, so that an error until then still becomes the answer's status.
            An answer that can tell errors itself need not: its headers can be sent while the request
            waits in line.

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
            if wait:
                await answer.begin()
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

"""Reads a text aloud in pieces: one request for each, the next one begun while one is spoken."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Final

from gateway.access.account import ClientAccount
from gateway.http.answer import AnswerEvent, HttpAnswer
from gateway.http.fields import named
from gateway.manager import Gateway
from gateway.requests.response_stream import ResponseStream
from omnirelay.errors import BusyError
from omnirelay.events import AudioEvent
from omnirelay.protocol import GenerateRequest

PATIENCE_S: Final = 60.0
"""How long a piece behind the first one waits for a place at the gateway."""
Names = Mapping[str, str | None]


async def read_aloud(
    gateway: Gateway,
    account: ClientAccount,
    names: Names,
    requests: AsyncIterable[GenerateRequest],
    first: HttpAnswer | None = None,
) -> AsyncGenerator[AnswerEvent, None]:
    """Yield the events of ``first``, then those of each request; the last of each is a DoneEvent.

    Args:
        gateway: Serves the requests.
        account: Of the client.
        names: As of :func:`gateway.http.fields.named`.
        requests: One for each piece; asked for the next one when there is audio of the one before.
        first: The answer to a request that was submitted already.

    Raises:
        OmniRelayError: A request was refused, or failed.
    """
    answers = _answers(gateway, account, names, requests)
    answer, ahead = first, None
    try:
        while (answer := answer or await (ahead or anext(answers, None))) is not None:
            ahead = None
            async for event in answer:
                if ahead is None and isinstance(event, AudioEvent):
                    ahead = asyncio.ensure_future(anext(answers, None))
                yield event
            answer.close()
            answer = None
    finally:
        if answer is not None:
            answer.close()
        if ahead is not None and not ahead.cancel() and (late := ahead.result()) is not None:
            late.close()


async def _answers(
    gateway: Gateway, account: ClientAccount, names: Names, requests: AsyncIterable[GenerateRequest]
) -> AsyncGenerator[HttpAnswer, None]:
    async for request in requests:
        with named(names):
            stream = await _submitted(gateway, account, request)
        yield HttpAnswer(stream, names)


async def _submitted(gateway: Gateway, account: ClientAccount, request: GenerateRequest) -> ResponseStream:
    """Submit a request, waiting for a place if the gateway is busy."""
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await gateway.submit(request, account)
        except BusyError as error:
            wait_s = error.retry_after_ms / 1000
            if asyncio.get_running_loop().time() + wait_s > until:
                raise
        await asyncio.sleep(wait_s)

"""Reads a text aloud in pieces: one request for each."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from typing import Final

from gateway.access.account import ClientAccount
from gateway.http.answer import AnswerEvent, HttpAnswer
from gateway.manager import Gateway
from omnirelay.errors import BusyError
from omnirelay.protocol import GenerateRequest
from omnirelay.reading import one_ahead

PATIENCE_S: Final = 60.0
"""How long a piece waits for a place at a busy gateway."""
Names = Mapping[str, str | None]


def read_aloud(
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

    async def answers() -> AsyncGenerator[HttpAnswer, None]:
        if first is not None:
            yield first
        async for request in requests:
            yield await _submitted(gateway, account, names, request)

    return one_ahead(answers(), HttpAnswer.close)


async def _submitted(
    gateway: Gateway, account: ClientAccount, names: Names, request: GenerateRequest
) -> HttpAnswer:
    """Submit a request, waiting for a place if the gateway is busy."""
    until = asyncio.get_running_loop().time() + PATIENCE_S
    while True:
        try:
            return await HttpAnswer.to(gateway, request, account, names)
        except BusyError as error:
            wait_s = error.retry_after_ms / 1000
            if asyncio.get_running_loop().time() + wait_s > until:
                raise
        await asyncio.sleep(wait_s)

"""Responses that are sent while the answer is generated."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.answer import HttpAnswer, close_all
from gateway.http.connection import ClientGoneError, while_connected
from gateway.http.errors import body_of
from omnirelay.errors import OmniRelayError
from shared.http.protocol import HALF_CLOSED
from shared.log import limited

PING_S: Final = 15.0
"""Longest silence of an event stream: proxies give up on silent upstreams."""
PING: Final = b": keep-alive\n\n"
END: Final = b"data: [DONE]\n\n"
UNBUFFERED: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Keeps proxies from buffering."""

log = logging.getLogger(__name__)


class Stream(Response):
    """A response in parts; closes its answers, and calls ``told`` with the error that ended it."""

    def __init__(
        self,
        parts: AsyncGenerator[Any, None],
        answers: Sequence[HttpAnswer],
        told: Callable[[OmniRelayError], None],
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(headers={**UNBUFFERED, **answers[0].headers}, media_type=media_type)
        del self.headers["content-length"]
        self._parts = parts
        self._answers = answers
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts until the end, or until the client disconnects."""
        try:
            async with aclosing(self._parts), while_connected(receive):
                start = {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
                await send(start)
                await self._send_parts(send, scope["state"][HALF_CLOSED])
        except ClientGoneError:
            log.debug("a client disconnected before the end of its answer")
        finally:
            close_all(self._answers)

    async def _send_parts(self, send: Send, half_closed: asyncio.Event) -> None:
        raise NotImplementedError


class EventStream(Stream):
    """Server-sent events, one for each part, then ``[DONE]``; comments while there is nothing to send.

    An error becomes the last event.
    """

    async def _send_parts(self, send: Send, half_closed: asyncio.Event) -> None:
        now = asyncio.get_running_loop().time
        sent = now()

        async def say(words: bytes) -> None:
            nonlocal sent
            await send(_piece(words))
            sent = now()

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(sent + PING_S - now())
                if now() - sent >= PING_S:
                    await say(PING)

        async def probe() -> None:
            """Find out whether a client that closed its sending side has closed the connection."""
            await half_closed.wait()
            await say(PING)

        pingers = [asyncio.create_task(keep_alive()), asyncio.create_task(probe())]
        try:
            async for each in self._parts:
                await say(_event(each))
        except OmniRelayError as error:
            self._told(error)
            await say(_event(body_of(error)))
        finally:
            for pinger in pingers:
                pinger.cancel()
        await send({"type": "http.response.body", "body": END})


class ByteStream(Stream):
    """A file; an error ends the connection before the end of the body."""

    async def _send_parts(self, send: Send, half_closed: asyncio.Event) -> None:
        del half_closed
        try:
            async for each in self._parts:
                await send(_piece(each))
        except OmniRelayError as error:
            self._told(error)
            limited(log).warning("a file was not sent completely: %s", error.for_log)
            return
        await send({"type": "http.response.body", "body": b""})


def _event(value: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def _piece(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}

"""Answers that are sent while they are made."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.answer import Answer
from gateway.http.connection import ClientGoneError, while_connected
from gateway.http.errors import body_of
from gateway.http.protocol import HALF_CLOSED
from omnirelay.errors import OmniRelayError
from shared.log import limited

PING_S: Final = 15.0
"""How long a stream of events may be silent: proxies give up what is so for long."""
PING: Final = b": keep-alive\n\n"
END: Final = b"data: [DONE]\n\n"
NOT_KEPT: Final = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Tells proxies to pass everything on at once."""

log = logging.getLogger(__name__)


class Stream(Response):
    """An answer that is sent while it is made.

    Args:
        parts: What to send.
        answer: Whose answer it is; it is closed at the end, whatever that is.
        told: Told about the error that it ends with.
        media_type: What is sent.
    """

    def __init__(
        self,
        parts: AsyncGenerator[Any, None],
        answer: Answer,
        told: Callable[[OmniRelayError], None],
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(headers={**NOT_KEPT, **answer.headers}, media_type=media_type)
        del self.headers["content-length"]
        self._parts = parts
        self._answer = answer
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; a client that leaves ends it."""
        self._half_closed: asyncio.Event = scope["state"][HALF_CLOSED]
        try:
            async with aclosing(self._parts), while_connected(receive):
                await self._start(send)
                await self._send_parts(send)
        except ClientGoneError:
            log.debug("a client did not wait for the end of its answer")
        finally:
            self._answer.close()

    async def _start(self, send: Send) -> None:
        status, headers = self.status_code, self.raw_headers
        await send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_parts(self, send: Send) -> None:
        raise NotImplementedError


class EventStream(Stream):
    """Server-sent events: one for each part, an object; then ``[DONE]``.

    An error becomes the last event.  While there is nothing to say, comments are sent.
    """

    async def _send_parts(self, send: Send) -> None:
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
            """Send something once the client has closed its sending side, to see whether it is there."""
            await self._half_closed.wait()
            await say(PING)

        pingers = [asyncio.create_task(keep_alive()), asyncio.create_task(probe())]
        try:
            async for each in self._parts:
                await say(_event(each))
        except OmniRelayError as error:
            self._told(error)
            await say(_event(body_of(error)))
        finally:
            for each in pingers:
                each.cancel()
        await send({"type": "http.response.body", "body": END})


class ByteStream(Stream):
    """A file.  An error breaks the connection off, which the client sees."""

    async def _send_parts(self, send: Send) -> None:
        try:
            async for each in self._parts:
                await send(_piece(each))
        except OmniRelayError as error:
            self._told(error)
            limited(log).warning("a file breaks off: %s", error.for_log)
            return
        await send({"type": "http.response.body", "body": b""})


def _event(value: Any) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(value)


def _piece(body: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": True}

"""Clients that disconnect before they have their answer, and what WebSockets send and receive."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar

import msgspec
from starlette.types import Receive
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.http.context import HttpContext

NORMAL: Final = 1000
"""The code of a WebSocket that is closed as it should be."""
log = logging.getLogger(__name__)
T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection."""


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block if the client disconnects; the request's body must have been read.

    Raises:
        ClientGoneError: The client disconnected.
    """
    task = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if task is not None:
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # The task may have been cancelled from elsewhere too.
        if not gone or task is None or task.uncancel() > 0:
            raise
        raise ClientGoneError from None
    finally:
        watcher.cancel()


async def received(receive: Callable[[], Awaitable[T]], idle_s: float, busy: Callable[[], bool]) -> T:
    """Wait for a message of a client, which ``receive`` waits for.

    Raises:
        TimeoutError: None has come for ``idle_s`` seconds, and the gateway is not ``busy`` for the client.
    """
    while True:
        try:
            async with asyncio.timeout(idle_s):
                return await receive()
        except TimeoutError:
            if not busy():
                raise


async def send(socket: WebSocket, message: str | bytes) -> None:
    """Send a message.

    Raises:
        ClientGoneError: The client disconnected.
    """
    try:
        await (socket.send_text(message) if isinstance(message, str) else socket.send_bytes(message))
    except (WebSocketDisconnect, RuntimeError) as error:
        # Starlette raises RuntimeError if this side has closed the connection meanwhile.
        raise ClientGoneError from error


async def close(socket: WebSocket, code: int, reason: str | None = None) -> None:
    """Close a WebSocket, unless it is closed."""
    with suppress(WebSocketDisconnect, RuntimeError):
        await socket.close(code, reason)


class JsonSocket:
    """One client's WebSocket of JSON messages.

    Attributes:
        hold: The memory of the messages that wait, until the connection ends.
    """

    def __init__(self, socket: WebSocket, context: HttpContext, idle_s: float) -> None:
        self._socket = socket
        self._context = context
        self._idle_s = idle_s
        self.hold: Final = context.gateway.held.of(context.share(socket))

    async def serve(self) -> None:
        """Accept the connection, and serve it to its end."""
        await self._socket.accept()
        try:
            await self._converse()
        except (ClientGoneError, WebSocketDisconnect) as error:
            log.debug("a client of %s disconnected: %s", self._socket.url.path, error)
        finally:
            self.hold.release()

    async def _converse(self) -> None:
        raise NotImplementedError

    async def _next(self, busy: Callable[[], bool]) -> str:
        """Wait for a message; TimeoutError as :func:`received`, ClientGoneError if the client disconnects."""
        message = await received(self._socket.receive, self._idle_s, busy)
        if message["type"] == "websocket.disconnect":
            raise ClientGoneError
        return message.get("text") or ""

    async def _send(self, event: dict[str, Any]) -> None:
        await send(self._socket, msgspec.json.encode(event).decode())

"""Clients that disconnect before they have their answer, and what WebSockets send and receive."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Message, Receive
from starlette.websockets import WebSocket, WebSocketDisconnect


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


async def received(socket: WebSocket, idle_s: float, busy: Callable[[], bool]) -> Message:
    """Wait for a message of a client.

    Raises:
        TimeoutError: None has come for ``idle_s`` seconds, and the gateway is not ``busy`` for the client.
    """
    while True:
        try:
            async with asyncio.timeout(idle_s):
                return await socket.receive()
        except TimeoutError:
            if not busy():
                raise


async def send_text(socket: WebSocket, text: str) -> None:
    """Send a message.

    Raises:
        ClientGoneError: The client disconnected.
    """
    try:
        await socket.send_text(text)
    except (WebSocketDisconnect, RuntimeError) as error:
        # Starlette raises RuntimeError if this side has closed the connection meanwhile.
        raise ClientGoneError from error

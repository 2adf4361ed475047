"""Clients that disconnect before they have their answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


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

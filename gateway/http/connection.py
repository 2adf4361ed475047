"""Clients that do not wait for their answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive


class ClientGoneError(Exception):
    """The client closed the connection: nobody waits for the answer."""


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Run the block as long as the client stays; the body of its request must have been read.

    Raises:
        ClientGoneError: It left; what the block waited for was cancelled.
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
        # Somebody else may have cancelled the task too, who must not be overheard.
        if not gone or task is None or task.uncancel() > 0:
            raise
        raise ClientGoneError from None
    finally:
        watcher.cancel()

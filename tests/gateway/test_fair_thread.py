"""A thread that clients use in turn."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from gateway.fairness.thread import FairThread
from omnirelay.errors import EmptyPromptError


def test_an_error_that_nobody_waits_for_is_not_logged() -> None:
    """A cancelled request's prompt may be refused afterwards."""
    unhandled: list[dict[str, Any]] = []
    going, cancelled = threading.Event(), threading.Event()

    def refuse() -> None:
        going.set()
        cancelled.wait()
        raise EmptyPromptError("there is nothing")

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        executor = FairThread("prompts")
        caller = asyncio.create_task(executor.run("a", refuse))
        await asyncio.to_thread(going.wait, 60)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        cancelled.set()
        # Behind it on the same thread.
        assert await executor.run("a", lambda: 3) == 3
        gc.collect()
        executor.close()

    asyncio.run(scenario())
    assert unhandled == []

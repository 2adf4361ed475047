"""Work that is done at the same time, and that does not outlive whoever waits for it."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results, in order; the first error cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _cancelled(tasks)


async def first_of(*works: Coroutine[Any, Any, T]) -> T:
    """Return the result, or raise the error, of the work that ends first; the others are cancelled.

    Of several that end together, an error counts before a result, and an earlier one before a later one.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        first, *_ = [task.result() for task in tasks if task in ended]
        return first
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: list[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Several answers to one request: OpenAI's choices."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from gateway.http.answer import HttpAnswer
from gateway.http.connection import while_connected

Chunks = AsyncGenerator[dict[str, Any], None]
T = TypeVar("T")


class Choices:
    """The answers, which end together.  Must be closed."""

    def __init__(self, answers: Sequence[HttpAnswer]) -> None:
        self._answers = answers

    @property
    def headers(self) -> dict[str, str]:
        """Headers that identify the first answer's request, as the id of the whole does."""
        return self._answers[0].headers

    @asynccontextmanager
    async def reading(self, receive: Receive) -> AsyncIterator[None]:
        """Cancel the block if the client disconnects, and close the answers behind it.

        Raises:
            ClientGoneError: The client disconnected.
        """
        try:
            async with while_connected(receive):
                yield
        finally:
            self.close()

    def close(self) -> None:
        """Release the requests, and cancel those that have not ended."""
        for answer in self._answers:
            answer.close()


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results; the first error ends them all."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def joined(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return whole answers of one choice each as one of all choices."""
    choices = [{**each["choices"][0], "index": at} for at, each in enumerate(objects)]
    return {**objects[0], "choices": choices, "usage": summed([each["usage"] for each in objects])}


def summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a chat's ``usage`` of all choices: the prompt counts once, as in OpenAI's API."""
    details = [usage["completion_tokens_details"] for usage in usages]
    written = sum(usage["completion_tokens"] for usage in usages)
    return {
        **usages[0],
        "completion_tokens": written,
        "total_tokens": usages[0]["prompt_tokens"] + written,
        "completion_tokens_details": {name: sum(each[name] for each in details) for name in details[0]},
    }


async def merged(streams: Sequence[Chunks]) -> Chunks:
    """Yield the chunks of all choices as they come, under one id; the usage, which ends each, is summed.

    Raises:
        OmniRelayError: A choice failed; the others are not waited for.
    """
    head: dict[str, Any] = {}
    ends: list[dict[str, Any]] = []
    coming = {_coming(stream): at for at, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=coming.__getitem__):
                at, chunk = coming.pop(task), task.result()
                if chunk is None:
                    continue
                coming[_coming(streams[at])] = at
                head = head or {name: chunk[name] for name in ("id", "created")}
                if chunk["choices"]:
                    yield {**chunk, **head, "choices": [{**each, "index": at} for each in chunk["choices"]]}
                else:
                    ends.append(chunk)
        if ends:
            yield {**ends[0], **head, "usage": summed([each["usage"] for each in ends])}
    finally:
        for task in coming:
            task.cancel()
        await asyncio.gather(*coming, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _coming(stream: Chunks) -> "asyncio.Task[dict[str, Any] | None]":
    """Begin to wait for the next chunk of a stream; none at its end."""

    async def following() -> dict[str, Any] | None:
        return await anext(stream, None)

    return asyncio.create_task(following())

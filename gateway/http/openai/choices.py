"""Several answers to one request: OpenAI's choices."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.http.answer import HttpAnswer, reading
from gateway.http.context import HttpContext
from gateway.http.errors import json_response
from gateway.http.streams import EventStream
from omnirelay.tasks import all_of

Chunks = AsyncGenerator[dict[str, Any], None]


def stream_of(context: HttpContext, answers: Sequence[HttpAnswer], streams: Sequence[Chunks]) -> EventStream:
    """Build the response that streams the chunks of all choices."""
    stream = merged(streams) if len(streams) > 1 else streams[0]
    return EventStream(stream, answers, context.told)


async def whole_of(
    request: Request,
    answers: Sequence[HttpAnswer],
    wholes: Sequence[Coroutine[Any, Any, dict[str, Any]]],
) -> Response:
    """Wait for all choices, and build the response of them; ClientGoneError if the client disconnects."""
    async with reading(request.receive, *answers):
        return json_response(joined(await all_of(wholes)), headers=answers[0].headers)


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
    coming = {asyncio.ensure_future(anext(stream, None)): at for at, stream in enumerate(streams)}
    try:
        while coming:
            done, _ = await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=coming.__getitem__):
                at, chunk = coming.pop(task), task.result()
                if chunk is None:
                    continue
                coming[asyncio.ensure_future(anext(streams[at], None))] = at
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

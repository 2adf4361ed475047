"""HTTP clients that close their sending side after a request, and still read the answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest

from tests.gateway.bench import Configure
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HI, MODEL, HttpBench, http_bench, http_gateway


def chat(version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps({"model": MODEL, "messages": HI, **fields}).encode()
    head = [f"POST /v1/chat/completions HTTP/{version}", "Host: localhost", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


@asynccontextmanager
async def half_closed(b: HttpBench, words: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection(*b.address)
    with closing(writer):
        writer.write(words)
        writer.write_eof()
        yield reader


@pytest.mark.parametrize("stream", [True, False])
async def test_it_gets_the_answer(configure: Configure, stream: bool) -> None:
    config = configure(http_gateway())
    async with http_bench(config) as b, half_closed(b, chat(stream=stream)) as reader:
        request = await b.stages.request(0)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 102 Processing\r\n\r\n"
        await b.stages.answer(request, b.encode("Hello"))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"Hello" in answer
        assert b"[DONE]" in answer or not stream
        assert b.counts["completed"] == 1


async def test_it_gets_the_rest_of_a_stream(web: HttpBench) -> None:
    reader, writer = await asyncio.open_connection(*web.address)
    with closing(writer):
        writer.write(chat(stream=True))
        request = await web.stages.request(0)
        await web.stages.text(request.request_id, 0, web.encode("Hello"))
        await reader.readuntil(b"Hello")
        writer.write_eof()
        await reader.readuntil(b": keep-alive\n\n")
        await web.stages.text(request.request_id, 1, web.encode(" world"), "stop")
        answer = await reader.read()
    assert b" world" in answer
    assert b"[DONE]" in answer


async def test_it_gets_both_answers_of_two_requests(configure: Configure) -> None:
    live = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"

    config = configure(http_gateway())
    async with http_bench(config) as b, half_closed(b, chat() + live) as reader:
        await b.stages.answer(await b.stages.request(0), b.encode("Hello"))
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("words", [chat("1.0"), chat()[:-1]], ids=["HTTP/1.0", "half a request"])
async def test_where_it_cannot_be_told_from_one_that_left_it_counts_as_gone(
    web: HttpBench, words: bytes
) -> None:
    async with half_closed(web, words) as reader:
        assert await reader.read() == b""
        await until(lambda: not web.process.access.open_requests)
        assert web.counts["completed"] == 0

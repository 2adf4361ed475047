"""Streamed chats that go on with a partial answer; clients that only close their sending side."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HI, MODEL, HttpBench, events_in
from tests.gateway.scripted import CHUNKS, CODES, TEXT, Script
from tests.gateway.test_http_faults import chat, raw

SPOKEN = {"modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
ASKED: dict[str, Any] = {"stream": True, "resumable": True, **SPOKEN}


class Reader:
    """Collects a stream, as the page does.

    Attributes:
        held: The partial answer, and the seed.
        text: What came.
        pcm: Pieces of 16-bit samples.
    """

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}
        self.text = ""
        self.pcm: list[bytes] = []
        self.ended = False

    async def read(self, b: HttpBench, enough: Callable[[], bool] = lambda: False) -> None:
        """Read until there is enough, then disconnect; or to the end."""
        body = {"model": MODEL, "messages": HI, **ASKED}
        if self.held:
            partial = {name: value for name, value in self.held.items() if name != "seed"}
            body |= {"seed": self.held["seed"], "resume": partial}
        async with b.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    self.ended = True
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))
                if enough():
                    return

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk
        for name, value in chunk.get("resume", {}).items():
            self.held[name] = [*self.held.get(name, []), *value] if isinstance(value, list) else value
        for choice in chunk["choices"]:
            audio = choice["delta"].get("audio", {})
            self.text += audio.get("transcript", "")
            if audio.get("data"):
                self.pcm.append(base64.b64decode(audio["data"], validate=True))


@pytest.mark.parametrize("chunks", [0, 2, 5])
async def test_a_spoken_answer_goes_on(web: HttpBench, chunks: int) -> None:
    whole, parted, script = Reader(), Reader(), Script(web)
    reading = asyncio.create_task(whole.read(web))
    await script.play(await web.stages.request(0))
    await reading
    assert whole.text == TEXT
    assert len(whole.pcm) == len(CHUNKS)

    reading = asyncio.create_task(
        parted.read(web, lambda: len(parted.pcm) == chunks and len(parted.text) > 9)
    )
    request = await web.stages.request(1)
    await script.play(request, text=0.6, codes=chunks / 5, chunks=chunks / 5)
    await reading
    await web.stages.aborted(request.request_id)
    assert not parted.ended
    assert (parted.held["request_id"], parted.held["seed"]) == (request.request_id, request.seed)
    reading = asyncio.create_task(parted.read(web))
    again = await web.stages.request(2)
    assert again.seed == request.seed
    await script.play(again)
    await reading
    assert parted.ended
    assert (parted.text, b"".join(parted.pcm)) == (whole.text, b"".join(whole.pcm))
    assert (parted.held["text_token_ids"], parted.held["codec_token_ids"]) == (script.text, CODES)
    assert parted.held["text_finish_reason"] == parted.held["codec_finish_reason"] == "stop"
    assert parted.held["chunk_samples"] == [len(chunk) // 4 for chunk in CHUNKS]


async def test_others_get_the_chunks_of_before(web: HttpBench) -> None:
    asked = asyncio.create_task(web.post(stream=True, **SPOKEN))
    await Script(web).play(await web.stages.request(0))
    assert '"resume"' not in (await asked).text


async def test_what_is_not_a_partial_answer(web: HttpBench) -> None:
    response = await web.post(**ASKED, resume={"request_id": "earlier", "chunk_samples": [7]})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "resume_invalid", "resume")
    assert web.stages.requests == []
    await until(lambda: not web.process.gateway._active)


async def test_each_token_of_a_text_is_told_once(web: HttpBench) -> None:
    asked = asyncio.create_task(web.post(stream=True, resumable=True))
    script = Script(web)
    await script.play(await web.stages.request(0))
    told = [chunk.get("resume", {}) for chunk in events_in((await asked).text)]
    assert [token for each in told for token in each.get("text_token_ids", [])] == script.text


@asynccontextmanager
async def half_closed(b: HttpBench, words: bytes) -> AsyncIterator[asyncio.StreamReader]:
    async with raw(b) as (reader, writer):
        writer.write(words)
        writer.write_eof()
        yield reader


@pytest.mark.parametrize("stream", [True, False])
async def test_it_gets_the_answer(web: HttpBench, stream: bool) -> None:
    async with half_closed(web, chat(stream=stream)) as reader:
        request = await web.stages.request(0)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 102 Processing\r\n\r\n"
        await web.stages.answer(request, web.encode("Hello"))
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"Hello" in answer
        assert b"[DONE]" in answer or not stream
        assert web.counts["completed"] == 1


async def test_it_gets_the_rest_of_a_stream(web: HttpBench) -> None:
    async with raw(web) as (reader, writer):
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


async def test_it_gets_both_answers_of_two_requests(web: HttpBench) -> None:
    live = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with half_closed(web, chat() + live) as reader:
        await web.stages.answer(await web.stages.request(0), web.encode("Hello"))
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200") == 2
        assert answer.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("words", [chat("1.0"), chat()[:-1]], ids=["HTTP/1.0", "half a request"])
async def test_who_might_have_left_counts_as_gone(web: HttpBench, words: bytes) -> None:
    async with half_closed(web, words) as reader:
        assert await reader.read() == b""
        await until(lambda: not web.process.access.open_requests)
        assert web.counts["completed"] == 0

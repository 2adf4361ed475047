"""HTTP clients that go away, do not read, write no HTTP, or name other hosts; and stages that die."""

import asyncio
import codecs
import gzip
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from gateway.fairness import uploads
from gateway.http import answer as answer_module
from gateway.http import streams
from shared.config import Config
from shared.http import protocol
from tests.gateway.bench import Configure, Log, Patch
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HI, MODEL, HttpBench, app_of, events_in, http_bench, http_gateway

SPEECH: dict[str, Any] = {"stream": True, "modalities": ["text", "audio"]}


@asynccontextmanager
async def raw(
    b: HttpBench, limit: int = 2**16
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(*b.address, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.close()


def http(path: str, body: bytes = b"", version: str = "1.1") -> bytes:
    head = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(body)}"]
    return "\r\n".join([*head, "", ""]).encode() + body


def chat(version: str = "1.1", **fields: Any) -> bytes:
    body = json.dumps({"model": MODEL, "messages": HI, **fields}).encode()
    return http("/v1/chat/completions", body, version)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "modalities": ["text"]}], ids=["one", "two choices"])
async def test_a_client_that_hangs_up_cancels(
    web: HttpBench, stream: bool, begun: bool, fields: dict[str, Any]
) -> None:
    async with raw(web) as (reader, writer):
        writer.write(chat(**{**SPEECH, "stream": stream, **fields}))
        requests = [await web.stages.request(index) for index in range(fields.get("n", 1))]
        for request in requests if begun else []:
            await web.stages.text(request.request_id, 0, web.encode("Hello"))
        if begun and stream:
            await reader.readuntil(b"Hello")
    for request in requests:
        await web.stages.aborted(request.request_id)
        assert (await web.http.get(f"/v1/requests/{request.request_id}")).json()["state"] == "cancelled"
    assert web.counts["cancelled"] == len(requests)


async def test_a_client_that_does_not_read_loses_its_request(configure: Configure) -> None:
    config = configure(http_gateway(), client_backlog_bytes=1_000_000)
    async with http_bench(config) as b, raw(b, limit=2**10) as (reader, writer):
        writer.write(chat(**SPEECH, audio={"format": "pcm16"}))
        request = await b.stages.request(0)
        await b.stages.text(request.request_id, 0, b.encode("Hello"))
        await reader.readuntil(b"Hello")
        for seq in range(1000):
            await b.stages.audio(request.request_id, seq, bytes(400_000))
            await asyncio.sleep(0)
            if b.counts["failed"]:
                break
        await b.stages.aborted(request.request_id)
        assert b"client_too_slow" in await tail(reader)


async def tail(reader: asyncio.StreamReader) -> bytes:
    """The end of a stream, however long it is."""
    last = b""
    while b"[DONE]" not in last:
        piece = await reader.read(2**16)
        assert piece
        last = last[-2000:] + piece
    return last


async def test_a_gateway_that_stops_tells_its_clients(web: HttpBench) -> None:
    answer = asyncio.create_task(web.post(**SPEECH))
    waiting = asyncio.create_task(web.post())
    request = await web.stages.request(0)
    await web.stages.request(1)
    await web.stages.text(request.request_id, 0, web.encode("Hello"))
    await until(lambda: web.process.gateway.report(request.request_id).text_tokens > 0)  # type: ignore[union-attr]
    web.process.gateway.close()
    reasons = (await web.http.get("/readyz")).json()["reasons"]
    assert reasons == ["the gateway is draining: it was told to stop"]
    http = web.process._http
    assert http is not None
    await http.close()
    told = (await answer).text
    assert events_in(told)[-1]["error"]["code"] == "cancelled"
    assert told.endswith("data: [DONE]\n\n")
    assert (await waiting).status_code == 503
    with pytest.raises(httpx.ConnectError):
        await web.http.get("/livez")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"model": MODEL, "messages": HI, **SPEECH}),
        ("/v1/audio/speech", {"model": MODEL, "input": "Hi", "stream_format": "sse"}),
    ],
    ids=["chat", "speech"],
)
async def test_a_stream_that_waits_in_line_has_headers_and_says_that_it_is_there(
    configure: Configure, monkeypatch: Patch, path: str, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(streams, "PING_S", 0.05)
    monkeypatch.setattr(answer_module, "HEADERS_WITHIN_S", 0.05)

    async with http_bench(configure(http_gateway(), max_active=1)) as b:
        first = asyncio.create_task(b.post())
        ahead = await b.stages.request(0)
        async with b.http.stream("POST", path, json=fields) as response:
            assert response.status_code == 200
            report = b.process.gateway.report(response.headers["x-request-id"])
            assert report is not None
            assert report.state == "queued"
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(4)] == [": keep-alive", ""] * 2
            await b.stages.answer(ahead, b.encode("Hi"))
            await first
            waited = await b.stages.request(1)
            await b.stages.fail(waited.request_id, "thinker", "media_invalid", "image 1: it is none")
            told = [line async for line in lines if line.startswith("data:")]
        assert json.loads(told[0].removeprefix("data: "))["error"]["code"] == "media_invalid"
        assert told[1:] == ["data: [DONE]"]


async def test_unexpected_errors_are_answered_too(web: HttpBench, monkeypatch: Patch, caplog: Log) -> None:
    with caplog.at_level(logging.ERROR):
        monkeypatch.setattr(web.process.gateway, "submit", AsyncMock(side_effect=ZeroDivisionError("inside")))
        answer = await web.post()
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        assert "inside" not in answer.text
    assert "ZeroDivisionError: inside" in caplog.text


NOWHERE: list[tuple[str, str, bytes, int, str]] = [
    ("/nowhere", "GET", b"", 404, "not_found"),
    ("/v1/chat/completions", "GET", b"", 405, "method_not_allowed"),
    ("/v1/realtime", "GET", b"", 426, "upgrade_required"),
    ("/v1/chat/completions", "POST", b"{", 400, "invalid_request"),
    ("/v1/chat/completions", "POST", b"", 400, "invalid_request"),
    ("/v1/chat/completions", "POST", b'{"model": "m\xff"}', 400, "invalid_request"),
    ("/v1/audio/speech", "POST", b"[]", 400, "invalid_request"),
    ("/v1/requests/nobody", "GET", b"", 404, "request_not_found"),
    ("/v1/models/gpt-4o", "GET", b"", 404, "model_not_found"),
]


async def test_requests_that_lead_nowhere(web: HttpBench) -> None:
    for path, method, body, status, code in NOWHERE:
        answer = await web.http.request(method, path, content=body)
        assert answer.status_code == status, path
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert answer.headers["x-request-id"].startswith("http_")
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert status != 405 or answer.headers["allow"] == "POST"
        assert status not in (404, 405, 426) or path.rpartition("/")[2] in error["message"]


async def test_bodies_over_the_limit(configure: Configure) -> None:
    media = {"max_item_bytes": 50_000, "max_request_bytes": 100_000}
    async with http_bench(configure(http_gateway(), media, request_bytes=400_000)) as b:
        content = b"x" * 400_001
        announced = await b.http.post("/v1/chat/completions", content=content)

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(content), 2**16):
                yield content[start : start + 2**16]

        chunked = await b.http.post("/v1/chat/completions", content=pieces())
        for answer in (announced, chunked):
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
        # As large as allowed is read; it is not a request, though.
        assert (await b.http.post("/v1/chat/completions", content=content[1:])).status_code == 400
        url = "data:;base64," + "A" * 80_000
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        large = await b.post(messages=[{"role": "user", "content": parts}])
        assert (large.status_code, large.json()["error"]["code"]) == (413, "media_too_large")
        b.stages.serve(b.encode("Hi"))
        assert (await b.post()).status_code == 200
        assert b.process.gateway.held.total == 0


async def test_a_body_may_be_packed(configure: Configure) -> None:
    media = {"max_item_bytes": 50_000, "max_request_bytes": 100_000}
    async with http_bench(configure(http_gateway(), media, request_bytes=400_000)) as b:
        b.stages.serve(b.encode("Hi"))
        plain = codecs.BOM_UTF8 + json.dumps({"model": "omnirelay", "messages": HI}).encode()

        async def status(content: bytes, coding: str) -> int:
            headers = {"Content-Encoding": coding}
            answer = await b.http.post("/v1/chat/completions", content=content, headers=headers)
            return answer.status_code

        packed = gzip.compress(plain)
        assert await status(plain, "identity") == 200
        assert await status(packed, "gzip") == 200
        assert await status(packed, "br") == 400
        for damaged in (packed[:-9], packed + b"x", packed[:20] + b"xxxx" + packed[24:], plain):
            assert await status(damaged, "gzip") == 400
        # A bomb: nothing beyond the limit is kept.
        assert await status(gzip.compress(bytes(50_000_000)), "gzip") == 413


async def hung_up_on(reader: asyncio.StreamReader) -> bytes:
    """What came until the other side closed."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize(
    "words",
    [
        http("/v1/chat/completions", b"x" * 5000)[:-1],
        http("/v1/chat/completions").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"),
        http("/v1/chat/completions").replace(b"Length: 0", b"Length: 30000000"),
    ],
    ids=["nearly all", "chunked", "large"],
)
async def test_slow_bodies_are_not_waited_for(web: HttpBench, monkeypatch: Patch, words: bytes) -> None:
    monkeypatch.setattr(uploads, "IDLE_S", 0.1)
    monkeypatch.setattr(protocol, "DRAIN_S", 0.1)

    async with raw(web) as (reader, writer):
        writer.write(words)
        answer = await hung_up_on(reader)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"upload_too_slow" in answer


async def test_a_client_that_breaks_off_its_body_harms_nobody(web: HttpBench) -> None:
    async with raw(web) as (_, writer):
        writer.write(http("/v1/chat/completions", b"x" * 400_000)[:-1])
        await writer.drain()
    web.stages.serve(web.encode("Hi"))
    assert (await web.post()).status_code == 200


async def test_a_body_that_breaks_off_is_no_error_of_ours(web: HttpBench, caplog: Log) -> None:
    head = b"POST /v1/none HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with raw(web) as (reader, writer):
        writer.write(head + b"zz\r\n")
        assert (await hung_up_on(reader)).startswith(b"HTTP/1.1 400")
    async with raw(web) as (reader, writer):
        writer.write(head.replace(b"POST", b"HEAD") + b"zz\r\n")
        answer, _, body = (await hung_up_on(reader)).partition(b"\r\n\r\n")
        assert (answer.startswith(b"HTTP/1.1 400"), body) == (True, b"")
    async with raw(web) as (reader, writer):
        writer.write(head)
        assert (await reader.readline()).startswith(b"HTTP/1.1 404")
        writer.write(b"zz\r\n")
        assert b"not_found" in await hung_up_on(reader)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


LOCAL = {"LOCALHOST": 200, "127.9.9.9": 200, "[::1]": 200}


@pytest.mark.parametrize(
    ("gateway", "statuses"),
    [
        (
            {"http_origins": ["https://chat.example"]},
            {"evil.example": 403, "127.0.0.1.evil.example": 403, "chat.example": 200, **LOCAL},
        ),
        ({"http": "tcp://0.0.0.0:8000"}, {"evil.example": 200}),
        ({"http": "tcp://0.0.0.0:8000", "http_hosts": []}, {"evil.example": 403, "192.0.2.1": 403, **LOCAL}),
        (
            {"http": "tcp://0.0.0.0:8000", "http_hosts": ["gateway", "2001:db8::1"]},
            {"evil.example": 403, "gateway": 200, "[2001:DB8::1]": 200},
        ),
    ],
)
async def test_a_gateway_answers_for_its_own_hosts_and_those_that_it_is_given(
    gateway: dict[str, Any], statuses: dict[str, int]
) -> None:
    app = httpx.ASGITransport(app_of(Config.model_validate({"gateway": gateway})))
    async with httpx.AsyncClient(transport=app, base_url="http://localhost") as http:
        for host, status in statuses.items():
            answer = await http.get("/livez", headers={"Host": f"{host}:8000"})
            assert answer.status_code == status, host
            assert status == 200 or answer.json()["error"]["code"] == "origin_refused"


async def test_nobody_may_frame_or_extend_the_page() -> None:
    app = httpx.ASGITransport(app_of(Config()))
    async with httpx.AsyncClient(transport=app, base_url="http://localhost") as http:
        page = await http.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert page.headers["referrer-policy"] == "no-referrer"
        assert (await http.get("/", headers={"If-None-Match": page.headers["etag"]})).status_code == 304
        for name in ("app.js", "style.css", "icon.svg"):
            assert (await http.get(f"/page/{name}")).headers["content-security-policy"] == policy
        for path in ("/page/none.js", "/page/..%2f__init__.py", "/page/__init__.py"):
            assert (await http.get(path)).status_code == 404

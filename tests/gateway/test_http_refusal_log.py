"""Each refused request leaves a line in the log, and none of them quotes what the client sent."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import closing, suppress

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from shared.config import Config
from tests.gateway.bench import run
from tests.gateway.http_bench import http_bench, http_gateway

Configure = Callable[..., Config]
MARK = "xyzzy"
NOT_HTTP = [
    (b"GET /livez HTTP/1.1\r\nHost: localhost\r\n bad xyzzy\x00: 1\r\n\r\n", "illegal header line"),
    (b"xyzzy\r\n\r\n", "illegal request line"),
    (
        b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        "both a Content-Length and a Transfer-Encoding",
    ),
    (
        b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: xyzzy\r\n\r\n",
        "Sec-WebSocket-Key",
    ),
]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about refused requests, all of which must be rate-limited."""
    found = [each for each in caplog.records if each.name.startswith("gateway.http")]
    assert all(hasattr(each, "limited") for each in found)
    assert MARK not in caplog.text
    return [each.getMessage() for each in found]


@pytest.mark.parametrize(("words", "problem"), NOT_HTTP, ids=lambda value: str(value)[:20])
def test_of_what_is_not_http(
    configure: Configure, caplog: pytest.LogCaptureFixture, words: bytes, problem: str
) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b:
            reader, writer = await asyncio.open_connection(*b.address)
            with closing(writer):
                writer.write(words)
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"bytearray" not in answer

    with caplog.at_level(logging.INFO, "gateway.http"):
        run(scenario())
    (line,) = refusals(caplog)
    assert line.startswith("400 ")
    assert problem in line


def test_of_connections_over_the_limit(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with http_bench(configure(http_gateway(), max_connections=1)) as b:
            _, first = await asyncio.open_connection(*b.address)
            reader, writer = await asyncio.open_connection(*b.address)
            with closing(first), closing(writer), suppress(ConnectionResetError):
                assert await reader.read() == b""

    with caplog.at_level(logging.INFO, "gateway.http"):
        run(scenario())
    assert refusals(caplog) == ["connection refused: no place for another one of its address"]


def test_of_websockets(
    configure: Configure, keys: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.realtime.opening.sessions.MAX_SESSIONS", 0)

    async def refused(url: str, **headers: str) -> None:
        with pytest.raises(InvalidStatus):
            await connect(url, additional_headers=headers)

    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b:
            url = f"ws://127.0.0.1:{b.address[1]}/v1/realtime"
            await refused(url, Origin=f"https://{MARK}.example")
            await refused(url)
        async with http_bench(configure(http_gateway(api_keys=keys))) as b:
            url = f"ws://127.0.0.1:{b.address[1]}/v1/realtime"
            await refused(url, Authorization=f"Bearer {MARK}")

    with caplog.at_level(logging.INFO, "gateway.http"):
        run(scenario())
    lines = [line.rsplit(" ", 2)[0] for line in refusals(caplog)]
    assert lines == ["GET 'another path' 403", "GET '/v1/realtime' 429", "GET 'another path' 401"]

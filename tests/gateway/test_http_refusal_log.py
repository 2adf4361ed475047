"""Each refused request leaves a line in the log, and none of them quotes what the client sent."""

import asyncio
import logging
from contextlib import closing, suppress

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.gateway.bench import Configure, run
from tests.gateway.http_bench import HI, MODEL, http_bench, http_gateway

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
    found = [each for each in caplog.records if each.name.startswith(("gateway.http", "shared.http"))]
    assert all(hasattr(each, "limited") for each in found)
    assert MARK not in caplog.text
    return [each.getMessage() for each in found]


@pytest.mark.parametrize(("words", "problem"), NOT_HTTP, ids=lambda value: str(value)[:20])
async def test_of_what_is_not_http(
    configure: Configure, caplog: pytest.LogCaptureFixture, words: bytes, problem: str
) -> None:
    with caplog.at_level(logging.INFO, "shared.http"), caplog.at_level(logging.INFO, "gateway.http"):
        async with http_bench(configure(http_gateway())) as b:
            reader, writer = await asyncio.open_connection(*b.address)
            with closing(writer):
                writer.write(words)
                answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 400")
            assert b"bytearray" not in answer
    (line,) = refusals(caplog)
    assert line.startswith("400 ")
    assert problem in line


async def test_of_connections_over_the_limit(configure: Configure, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shared.http"):
        async with http_bench(configure(http_gateway(), max_connections=1)) as b:
            _, first = await asyncio.open_connection(*b.address)
            reader, writer = await asyncio.open_connection(*b.address)
            with closing(first), closing(writer), suppress(ConnectionResetError):
                assert await reader.read() == b""
    assert refusals(caplog) == ["connection refused: no place for another one of its address"]


async def test_of_websockets(
    configure: Configure, keys: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.realtime.endpoint.MAX_SESSIONS", 0)

    async def refused(url: str, **headers: str) -> None:
        with pytest.raises(InvalidStatus):
            await connect(url, additional_headers=headers)

    with caplog.at_level(logging.INFO, "gateway.http"):
        async with http_bench(configure(http_gateway())) as b:
            url = f"ws://127.0.0.1:{b.address[1]}/v1/realtime"
            await refused(url, Origin=f"https://{MARK}.example")
            await refused(url)
        async with http_bench(configure(http_gateway(api_keys=keys))) as b:
            url = f"ws://127.0.0.1:{b.address[1]}/v1/realtime"
            await refused(url, Authorization=f"Bearer {MARK}")
    lines = [line.rsplit(" ", 3)[0] for line in refusals(caplog)]
    assert lines == ["GET 'another path' 403", "GET '/v1/realtime' 429", "GET 'another path' 401"]


def test_one_id_is_in_the_answer_and_in_the_log(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a request that is refused, and of one that fails at a stage before its first event."""

    ids: list[str] = []

    async def scenario() -> None:
        async with http_bench(configure(http_gateway())) as b:
            path, foul_body = "/v1/chat/completions", {"model": MODEL, "messages": HI, "top_p": 9}
            refused = await b.http.post(path, json=foul_body, headers={"X-Request-Id": "mine-1"})
            assert (refused.status_code, refused.headers["x-client-request-id"]) == (400, "mine-1")
            foul = await b.http.post(path, json=foul_body, headers={"X-Request-Id": "m" * 200})
            assert "x-client-request-id" not in foul.headers
            sent = asyncio.create_task(b.post())
            think = await b.stages.request(0)
            await b.stages.fail(think.request_id, "thinker", "invalid_request", "it broke")
            failed = await sent
            assert failed.headers["x-request-id"] == think.request_id
            ids.extend(each.headers["x-request-id"] for each in (refused, foul, failed))

    with caplog.at_level(logging.INFO, "gateway"):
        run(scenario())
    assert len(set(ids)) == 3
    for each in ids:
        assert any(getattr(line, "request_id", None) == each for line in caplog.records), each


async def test_what_fails_by_the_stack_is_a_warning(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    names: list[str] = []

    with caplog.at_level(logging.INFO, "gateway"):
        async with http_bench(configure(http_gateway() | {"resume_attempts": 0})) as b:
            sent = asyncio.create_task(b.post())
            think = await b.stages.request(0)
            await b.stages.fail(think.request_id, "thinker", "stage_unavailable", "it left")
            failed = await sent
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "5")
            names.append(think.request_id)
    levels = {line.name: line.levelno for line in caplog.records if getattr(line, "request_id", "") in names}
    assert levels == {"gateway.manager": logging.WARNING, "gateway.http.guards.guard": logging.WARNING}


async def test_the_log_names_the_route_and_not_what_stands_in_it(
    configure: Configure, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gateway.http"):
        async with http_bench(configure(http_gateway())) as b:
            await b.http.post(f"/v1/realtime/calls/rtc_{MARK}/hangup")
            await b.http.get(f"/v1/requests/{MARK}")
    lines = refusals(caplog)
    assert [line.split("'")[1] for line in lines] == [
        "/v1/realtime/calls/{call_id}/hangup",
        "/v1/requests/{request_id}",
    ]

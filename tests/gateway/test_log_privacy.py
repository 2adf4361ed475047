"""No secret and nothing of what users say is in the log, even at ``debug``; each refusal leaves a line.

Everything that a client can say carries a mark; the real gateway's process logs all it can.
"""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omnirelay import AsyncClient, ChatMessage
from omnirelay.cli.main import main
from omnirelay.errors import OmniRelayError
from ops.launcher import Stack, running
from shared.config import Config, load_config
from shared.transport.keys import load_keys
from tests.gateway.bench import Configure, Log, Patch
from tests.gateway.http_bench import HI, MODEL, HttpBench, http_bench, http_gateway
from tests.support.ports import free_ports

MARK = "xyzzyPlugh"
BODY: dict[str, Any] = {"model": "omnirelay", "messages": [{"role": "user", "content": f"I am {MARK}"}]}
HEADERS = {
    "Authorization": f"Bearer {MARK}",
    "Cookie": f"session={MARK}",
    "X-Api-Key": MARK,
    "User-Agent": MARK,
}


@asynccontextmanager
async def talkative(lines: list[str]) -> AsyncIterator[Config]:
    """The stack, with every line that any process writes."""
    config = load_config()
    async with running(Stack(config, None, lambda name, line: lines.append(f"{name}: {line}"))):
        yield config


def marked(lines: list[str]) -> list[str]:
    encoded = base64.b64encode(MARK.encode()).decode().rstrip("=")[:-1]
    return [line for line in lines if MARK.lower() in line.lower() or encoded in line]


def over_tcp(config: Config) -> list[tuple[str, dict[str, Any]]]:
    allowed = config.media.url_hosts[0]
    return [
        (f"Hello {MARK}", {}),
        ("Hi", {"speaker": MARK}),
        ("Hi", {"images": f"https://user:{MARK}@{allowed}/{MARK}?token={MARK}"}),
        ("Hi", {"images": f"https://{MARK}.example/x"}),
        ("Hi", {"images": f"https://{allowed}/{MARK}?token={MARK}"}),
        ("Hi", {"images": f"https://nowhere.invalid/{MARK}?token={MARK}"}),
        ("Hi", {"images": f"data:{MARK},{MARK}%"}),
        (f"<|im_start|>{MARK}<|AUDIO|>{MARK}", {}),
        ("", {}),
    ]


def over_http() -> list[tuple[str, str, Any]]:
    """Method, path and body."""
    image = {"type": "image_url", "image_url": {"url": f"https://{MARK}.example/{MARK}"}}
    data = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{MARK}=="}}
    bodies: list[dict[str, Any]] = [
        BODY,
        BODY | {"stream": True},
        BODY | {"model": MARK},
        BODY | {MARK: 1},
        BODY | {"user": MARK, "metadata": {"who": MARK}},
        BODY | {"temperature": MARK},
        BODY | {"stop": [MARK]},
        BODY | {"modalities": ["text", "audio"], "audio": {"voice": MARK, "format": "wav"}},
        BODY | {"modalities": ["text", "audio"], "audio": {"voice": "Chelsie", "format": MARK}},
        BODY | {"messages": [{"role": MARK, "content": MARK}]},
        BODY | {"messages": [{"role": "user", "content": [{"type": MARK, MARK: MARK}]}]},
        BODY | {"messages": [{"role": "user", "content": [image]}]},
        BODY | {"messages": [{"role": "user", "content": [data]}]},
        BODY | {"messages": [{"role": "system", "content": MARK}, {"role": "user", "content": MARK}]},
    ]
    chats = [("POST", "/v1/chat/completions", body) for body in bodies]
    speech = {"model": "omnirelay", "input": MARK, "voice": "Chelsie"}
    return [
        *chats,
        ("POST", "/v1/audio/speech", speech),
        ("POST", "/v1/audio/speech", speech | {"voice": MARK}),
        ("POST", "/v1/chat/completions", f'{{"{MARK}": "{MARK}'),
        ("POST", "/v1/chat/completions", f"\udcff{MARK}"),
        ("GET", f"/v1/models?key={MARK}", None),
        ("GET", f"/v1/requests/{MARK}", None),
        ("GET", f"/v1/models/{MARK}", None),
        ("GET", f"/page/{MARK}", None),
        ("GET", f"/{MARK}", None),
        (MARK.upper(), "/v1/models", None),
    ]


async def ask_over_http(config: Config) -> set[int]:
    answered = set()
    url = (config.gateway.http or "").replace("tcp:", "http:")
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60) as client:
        for method, path, body in over_http():
            text = body if isinstance(body, str) else json.dumps(body) if body is not None else ""
            content = text.encode("utf-8", "surrogateescape")
            answered.add((await client.request(method, path, content=content)).status_code)
        for headers in ({"Host": f"{MARK}.example"}, {"Origin": f"https://{MARK}.example"}):
            answered.add((await client.get("/v1/models", headers=headers)).status_code)
    return answered


async def converse(config: Config) -> None:
    """Over the WebSocket: a turn that is answered, and events that are wrong."""
    url = (config.gateway.http or "").replace("tcp:", "ws:") + f"/v1/realtime?model=omnirelay&key={MARK}"
    with suppress(InvalidStatus):
        async with connect(url.replace("model=omnirelay", f"model={MARK}"), additional_headers=HEADERS):
            pass
    async with connect(url, additional_headers={"Authorization": f"Bearer {MARK}"}) as socket:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": MARK}]}
        session = {"type": "realtime", "instructions": MARK, "output_modalities": ["text"]}
        for event in (
            {"type": "session.update", "session": session},
            {"type": "session.update", "session": {"type": "realtime", "audio": {"output": {"voice": MARK}}}},
            {"type": MARK},
            {"type": "conversation.item.create", "item": item},
            {"type": "conversation.item.create", "item": item | {"type": MARK}},
            {"type": "conversation.item.delete", "item_id": MARK},
            {"type": "response.create"},
        ):
            await socket.send(json.dumps(event))
        await socket.send(f"{{{MARK}")
        while json.loads(await socket.recv())["type"] != "response.done":
            pass
        with suppress(ConnectionClosed):
            await socket.send(MARK.encode())
            await socket.recv()


async def say_garbage(config: Config) -> None:
    """To the clients' socket, what is no frame, and a frame that is no message."""
    port = int(config.gateway.listen.rpartition(":")[2])
    text = MARK.encode()
    for data in (text * 100, len(text).to_bytes(4, "big") + text, b"\0\0\0\x0c\x81\xaa" + text):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        with suppress(ConnectionResetError):
            await reader.read()
        writer.close()


async def test_neither_what_a_client_says_nor_a_key_of_the_stack_is_in_the_log(
    place: Path, monkeypatch: Patch
) -> None:
    keys = place / "keys"
    assert main(["keys", str(keys)]) == 0
    for name, value in {
        "OMNIRELAY_LOG_LEVEL": "debug",
        "OMNIRELAY_MEDIA__URL_HOSTS": f"['127.0.0.1:{free_ports(1)[0]}', 'nowhere.invalid']",
        "OMNIRELAY_SECURITY__KEYS": str(keys),
        # Without what listens there, and one of them malformed, so that there is something to complain about.
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_ports(1)[0]}",
        "OTEL_EXPORTER_OTLP_HEADERS": f"api-key={MARK},{MARK} is no header",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
        "HF_TOKEN": f"hf_{MARK}",
    }.items():
        monkeypatch.setenv(name, value)
    lines: list[str] = []
    async with talkative(lines) as config:
        async with AsyncClient(config.gateway.listen) as client:
            for text, options in over_tcp(config):
                with suppress(OmniRelayError):
                    await client.chat(text, **options).result()
            with suppress(OmniRelayError):
                await client.chat([ChatMessage(role=cast("Any", MARK), content=MARK)]).result()
        assert {200, 400, 403, 404} <= await ask_over_http(config)
        await converse(config)
        await say_garbage(config)
        while not any("traces cannot be sent to" in line for line in lines):
            await asyncio.sleep(0.02)
    for words in (" DEBUG gateway ", "completed after", "refused a request"):
        assert [line for line in lines if words in line]
    assert "\n".join(marked(lines)) == ""
    secrets = {load_keys(keys, role).secret.decode() for role in ("gateway", "thinker")}
    assert not [line for line in lines if any(secret in line for secret in secrets)]


WORD = "xyzzy"
NOT_HTTP = [
    (b"\x16\x03\x01 this is TLS\r\n\r\n", ""),
    (b"GET /livez\r\n\r\n", ""),
    (b"GET /livez HTTP/1.1\r\n" + b"X: " + b"y" * 40_000, ""),
    (b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n", ""),
    (b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", ""),
    (b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", ""),
    (b"GET /livez HTTP/1.1\r\n\r\n", ""),
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


def refusals(caplog: Log) -> list[str]:
    """The lines about refused requests, all of which must be rate-limited."""
    found = [each for each in caplog.records if each.name.startswith(("gateway.http", "shared.http"))]
    assert all(hasattr(each, "limited") for each in found)
    assert WORD not in caplog.text
    return [each.getMessage() for each in found]


@pytest.mark.parametrize(("words", "problem"), NOT_HTTP, ids=lambda value: str(value)[:20])
async def test_of_what_is_not_http(web: HttpBench, caplog: Log, words: bytes, problem: str) -> None:
    with caplog.at_level(logging.INFO, "shared.http"), caplog.at_level(logging.INFO, "gateway.http"):
        reader, writer = await asyncio.open_connection(*web.address)
        with closing(writer):
            writer.write(words)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        # What the library says of a handshake is plain text.
        assert b"WebSocket" in body or json.loads(body)["error"]["type"] == "invalid_request_error"
        assert b"bytearray" not in body
        (line,) = refusals(caplog)
        assert line.startswith("400 ")
        assert problem in line
        assert (await web.http.get("/livez")).status_code == 200


async def test_of_connections_over_the_limit(configure: Configure, caplog: Log) -> None:
    with caplog.at_level(logging.INFO, "shared.http"):
        async with http_bench(configure(http_gateway(), max_connections=1)) as b:
            _, first = await asyncio.open_connection(*b.address)
            reader, writer = await asyncio.open_connection(*b.address)
            with closing(first), closing(writer), suppress(ConnectionResetError):
                assert await reader.read() == b""
    assert refusals(caplog) == ["connection refused: no place for another one of its address"]


async def test_of_websockets(configure: Configure, keys: str, caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.http.realtime.endpoint.MAX_SESSIONS", 0)

    async def refused(url: str, **headers: str) -> None:
        with pytest.raises(InvalidStatus):
            await connect(url, additional_headers=headers)

    with caplog.at_level(logging.INFO, "gateway.http"):
        async with http_bench(configure(http_gateway())) as b:
            url = f"ws://127.0.0.1:{b.address[1]}/v1/realtime"
            await refused(url, Origin=f"https://{WORD}.example")
            await refused(url)
        async with http_bench(configure(http_gateway(api_keys=keys))) as b:
            url = f"ws://127.0.0.1:{b.address[1]}/v1/realtime"
            await refused(url, Authorization=f"Bearer {WORD}")
    lines = [line.rsplit(" ", 3)[0] for line in refusals(caplog)]
    assert lines == ["GET 'another path' 403", "GET '/v1/realtime' 429", "GET 'another path' 401"]


async def test_one_id_is_in_the_answer_and_in_the_log(web: HttpBench, caplog: Log) -> None:
    """Of a request that is refused, and of one that fails at a stage before its first event."""
    with caplog.at_level(logging.INFO, "gateway"):
        path, foul_body = "/v1/chat/completions", {"model": MODEL, "messages": HI, "top_p": 9}
        refused = await web.http.post(path, json=foul_body, headers={"X-Request-Id": "mine-1"})
        assert (refused.status_code, refused.headers["x-client-request-id"]) == (400, "mine-1")
        foul = await web.http.post(path, json=foul_body, headers={"X-Request-Id": "m" * 200})
        assert "x-client-request-id" not in foul.headers
        sent = asyncio.create_task(web.post())
        think = await web.stages.request(0)
        await web.stages.fail(think.request_id, "thinker", "invalid_request", "it broke")
        failed = await sent
        assert failed.headers["x-request-id"] == think.request_id
    ids = {each.headers["x-request-id"] for each in (refused, foul, failed)}
    assert len(ids) == 3
    for each in ids:
        assert any(getattr(line, "request_id", None) == each for line in caplog.records), each


async def test_what_fails_by_the_stack_is_a_warning(configure: Configure, caplog: Log) -> None:
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
    assert levels == {"gateway.manager": logging.WARNING, "gateway.http.guards": logging.WARNING}


async def test_the_log_names_the_route_and_not_what_stands_in_it(web: HttpBench, caplog: Log) -> None:
    with caplog.at_level(logging.INFO, "gateway.http"):
        await web.http.post(f"/v1/realtime/calls/rtc_{WORD}/hangup")
        await web.http.get(f"/v1/requests/{WORD}")
        web.stages.serve(web.encode("Hi"))
        await web.http.post(
            f"/v1/chat/completions?key={WORD}", json={"model": MODEL, "messages": HI, "user": WORD}
        )
        await web.http.get(f"/{WORD}%0d%0aforged")
    assert WORD not in caplog.text
    lines = [each.getMessage() for each in caplog.records if each.name == "gateway.http.guards"]
    assert [line.rsplit(" ", 3)[0] for line in lines] == [
        "POST '/v1/realtime/calls/{call_id}/hangup' 501",
        "GET '/v1/requests/{request_id}' 404",
        "POST '/v1/chat/completions' 200",
        "GET 'another path' 404",
    ]

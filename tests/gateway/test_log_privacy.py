"""No secret and nothing of what users say is in the log, even at ``debug`` and when something is wrong.

Everything that a client can say carries a mark; the real gateway's process logs all it can.
"""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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
from tests.gateway.bench import run
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


@pytest.fixture
def talks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIRELAY_LOG_LEVEL", "debug")
    monkeypatch.setenv("OMNIRELAY_MEDIA__URL_HOSTS", f"['127.0.0.1:{free_ports(1)[0]}', 'nowhere.invalid']")


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
    async with httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=10) as client:
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


async def test_nothing_that_a_client_says_is_in_the_log(talks: None) -> None:
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
    assert [line for line in lines if " DEBUG gateway " in line]
    assert [line for line in lines if "completed after" in line]
    assert [line for line in lines if "refused a request" in line]
    assert "\n".join(marked(lines)) == ""


def test_no_key_and_no_header_for_a_collector_is_in_the_log(
    talks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["keys", str(tmp_path / "keys")]) == 0
    monkeypatch.setenv("OMNIRELAY_SECURITY__KEYS", str(tmp_path / "keys"))
    # Without what listens there, and one of them malformed, so that there is something to complain about.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"api-key={MARK},{MARK} is no header")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("HF_TOKEN", f"hf_{MARK}")
    lines: list[str] = []

    async def scenario() -> None:
        async with talkative(lines) as config, AsyncClient(config.gateway.listen) as client:
            await client.chat("Hi").result()
            while not any("traces cannot be sent to" in line for line in lines):
                await asyncio.sleep(0.02)

    run(scenario())
    assert "\n".join(marked(lines)) == ""
    secrets = {load_keys(tmp_path / "keys", role).secret.decode() for role in ("gateway", "thinker")}
    assert not [line for line in lines if any(secret in line for secret in secrets)]

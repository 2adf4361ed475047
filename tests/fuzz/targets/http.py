"""Bytes on an HTTP connection of the gateway, whole and cut; the first byte is ignored."""

import asyncio
import base64
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final
from unittest import mock

import msgspec

from gateway.http.server import HttpServer, api_server
from tests.fuzz.intake import INTERNAL, Intake, context
from tests.fuzz.streams import Transport, at_once, cut, settle

STATUS: Final = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
SWITCHING: Final = b"HTTP/1.1 101"
BROKEN: Final = b"invalid HTTP request"
# What no two answers have in common: the time, drawn names, and numbers of metrics.
_OWN: Final = re.compile(
    rb"\r\n(date|x-request-id|content-length): [^\r]*|^[a-z_]+(\{[^}]*\})? [-+0-9.einfa]+$", re.M | re.I
)
ROUNDS: Final = 40


def check(data: bytes) -> None:
    """Serve a connection on which this comes, in two ways."""
    rest = data[1:]
    # Who upgrades waits for the answer before more is said.
    end = rest.find(b"\r\n\r\n") + 4
    head, more = (rest[:end], rest[end:]) if end > 3 else (rest, b"")
    with mock.patch("asyncio.to_thread", at_once):
        whole = asyncio.run(_serve([each for each in (head, more) if each]))
        pieces = asyncio.run(_serve([*cut(head), *cut(more)]))
    for written in (whole, pieces):
        for status in STATUS.findall(written):
            assert status != b"500", written
    # What is drawn for a session is in its events; and of a request that breaks off it depends on time
    # whether somebody has answered it before.  Of a HEAD only the status says that it broke off.
    telling = (SWITCHING, BROKEN, *([b"HTTP/1.1 400"] if b"HEAD" in rest else []))
    if not any(each in written for each in telling for written in (whole, pieces)):
        assert _OWN.sub(b"", whole) == _OWN.sub(b"", pieces)


async def _serve(pieces: list[bytes]) -> bytes:
    """Give what the gateway answers."""
    server, intake = _server()
    intake.metrics.codes.clear()
    transport = Transport()
    transport.protocol = server.protocol()
    transport.protocol.connection_made(transport)
    for piece in pieces:
        if transport.is_closing():
            break
        transport.protocol.data_received(piece)
        await settle(ROUNDS)
    transport.protocol.eof_received()
    transport.protocol.connection_lost(None)
    if tasks := set(server.server_state.tasks):
        done, pending = await asyncio.wait(tasks, timeout=60)
        assert not pending, "it goes on when nobody is there any more"
        for task in done:
            task.result()
    await settle()
    assert INTERNAL not in intake.metrics.codes
    assert not intake.held.total
    assert not server.server_state.connections
    return bytes(transport.written)


@cache
def _server() -> tuple[HttpServer, Intake]:
    api, intake = context()
    return api_server("tcp://127.0.0.1:0", api), intake


def seeds() -> Iterator[bytes]:
    """Give what HTTP clients write."""
    paths = ("/", "/page/page.js", "/livez", "/readyz", "/health", "/v1/models", "/v1/models/omnirelay")
    for path in (*paths, "/v1/requests/gw.1", "/v1/none%20", "/metrics"):
        yield b"g" + _request("GET", path)
    yield b"g" + _request("OPTIONS", "/v1/models", {"Origin": "http://example.com"})
    yield b"g" + _request("GET", "/livez") + _request("HEAD", "/v1/models", {"Host": "evil.example"})
    chat = msgspec.json.encode({"model": "omnirelay", "messages": [{"role": "user", "content": "Hi"}]})
    headers = {
        "Authorization": "Bearer omr_1",
        "traceparent": f"00-{'1' * 32}-{'2' * 16}-01",
        "Content-Type": "application/json",
    }
    for path in ("/v1/chat/completions", "/v1/audio/speech"):
        yield b"g" + _request("POST", path, headers | {"Content-Length": str(len(chat))}, chat)
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in (chat[:9], chat[9:])) + b"0\r\n\r\n"
    yield b"g" + _request("POST", "/v1/chat/completions", {"Transfer-Encoding": "chunked"}, pieces)
    yield b"g" + _request("POST", "/v1/audio/speech", {"Content-Length": "99999999999"}, chat)
    upgrade = {
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
        "Sec-WebSocket-Protocol": "realtime, openai-insecure-api-key.omr_1",
    }
    events = [
        {"type": "session.update", "session": {"type": "realtime", "instructions": "Be kind"}},
        {"type": "input_audio_buffer.append", "audio": "AAABAA=="},
        {"type": "input_audio_buffer.commit"},
        {"type": "response.create"},
    ]
    frames = b"".join(_frame(1, msgspec.json.encode(event)) for event in events)
    yield b"g" + _request("GET", "/v1/realtime?model=omnirelay", upgrade, frames)
    others = _frame(9, b"ping") + _frame(2, b"bytes") + _frame(8, b"\x03\xe8")
    yield b"g" + _request("GET", "/v1/realtime", upgrade, others)


def _request(method: str, target: str, headers: dict[str, Any] | None = None, body: bytes = b"") -> bytes:
    lines = [f"{name}: {value}" for name, value in ({"Host": "localhost"} | (headers or {})).items()]
    return "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""]).encode() + body


def _frame(opcode: int, payload: bytes) -> bytes:
    """A frame of a WebSocket's client, masked by zeros so that it can be read."""
    length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + len(payload).to_bytes(2, "big")
    return bytes([0x80 | opcode]) + length + bytes(4) + payload

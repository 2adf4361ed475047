"""Bytes on an HTTP connection of the gateway, whole and cut; the first byte is ignored."""

import asyncio
import re
from functools import cache
from typing import Final
from unittest import mock

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

"""What is said in JSON; the first byte tells chat, speech, or the events of a session, a line each."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final
from unittest import mock

import msgspec
from starlette.requests import Request

from gateway.access.account import Principal
from gateway.http.body import read_body
from gateway.http.guards import CLIENT, REQUEST_ID
from gateway.http.openai import strings
from gateway.http.openai.chat_request import ChatAnswerOptions, read_chat
from gateway.http.openai.speech import read_speech
from gateway.http.realtime.events import Transport
from gateway.http.realtime.session import Session
from gateway.http.realtime.settings import Settings
from gateway.http.realtime.turn_detection import VoicePool
from omnirelay.content import TextPart, parts_of
from omnirelay.errors import CancelledRequestError, InvalidRequestError, MediaError, OmniRelayError
from omnirelay.protocol import GenerateRequest
from shared.families import SPEECH_SYSTEM_PROMPT
from tests.fuzz.intake import CONFIG, INTERNAL, context, data_of
from tests.fuzz.streams import at_once, cut

LONG: Final = 16
"""Longer strings count as long here, as those of a file would."""
LIMITS: Final = CONFIG.gateway.limits
VOICES: Final = VoicePool()
_read_speech = partial(read_speech, system_prompt=SPEECH_SYSTEM_PROMPT)


def _read_chat(body: bytearray) -> tuple[ChatAnswerOptions, GenerateRequest]:
    return read_chat(strings.parse(body, CONFIG.media.max_item_bytes), LIMITS.max_text_tokens)


def check(data: bytes) -> None:
    """Read a body, or follow a session."""
    kind, body = data[:1], data[1:]
    if kind == b"r":
        with mock.patch("asyncio.to_thread", at_once):
            asyncio.run(_converse(body.split(b"\n")))
    elif kind == b"s":
        _ask(body, _read_speech)
    else:
        _ask(body, _read_chat)
        _check_long_strings(body)


def _ask(body: bytes, parse: Callable[[bytearray], tuple[Any, GenerateRequest]]) -> None:
    """A body is read and its request checked; in pieces it is the same body."""
    whole = asyncio.run(_submit([body], parse))
    assert whole == asyncio.run(_submit(cut(body), parse))
    assert INTERNAL not in whole


async def _submit(
    pieces: list[bytes], parse: Callable[[bytearray], tuple[Any, GenerateRequest]]
) -> tuple[str, ...]:
    api, intake = context()
    client = Principal("client 1")
    waiting = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    waiting.append({"type": "http.request", "body": b"", "more_body": False})

    async def received() -> dict[str, Any]:
        return waiting.pop(0)

    headers = [(b"content-length", str(sum(map(len, pieces))).encode())]
    scope = {"type": "http", "headers": headers, CLIENT: client, REQUEST_ID: "http_1"}
    try:
        options, asked = await read_body(Request(scope, received), api, parse)
        written = _written(asked)
        await intake.submit(asked, api.account(Request(scope, received)))
    except CancelledRequestError:
        return (repr(options), written.hex())
    except OmniRelayError as error:
        return (error.code, str(error))
    finally:
        assert not intake.held.total
        assert not api.uploads.used
        assert not client.open_requests
    raise AssertionError("neither taken nor refused")


def _written(asked: GenerateRequest) -> bytes:
    """A request in the gateway's own protocol, from which it reads the same."""
    try:
        written = msgspec.msgpack.encode(asked)
    except OverflowError:
        # JSON has integers of any length, and MessagePack has not; what goes to a stage is bounded before.
        return b""
    assert msgspec.msgpack.encode(msgspec.msgpack.decode(written, type=GenerateRequest)) == written
    return written


def _check_long_strings(body: bytes) -> None:
    """Long strings are cut out before JSON is read; what is read is the same all the same."""
    with mock.patch.object(strings, "MIN_LENGTH", LONG):
        short = _content(body)
    plain = _content(body)
    if short is not None and plain is not None:
        assert short == plain


def _content(body: bytes) -> list[object] | None:
    try:
        _, asked = _read_chat(bytearray(body))
        return [[_seen(part) for part in parts_of(message)] for message in asked.messages]
    except (InvalidRequestError, MediaError):
        return None


def _seen(part: Any) -> object:
    if isinstance(part, TextPart):
        return part.text
    try:
        return type(part), bytes(data_of("item", part) or b"")
    except MediaError as error:
        return error.code


async def _converse(lines: list[bytes]) -> None:
    api, intake = context()
    client = Principal("client 1")
    account = api.access.account("client 1", client)
    sent: list[tuple[str, Any]] = []

    async def send(kind: str, fields: dict[str, Any]) -> None:
        sent.append((kind, msgspec.json.decode(msgspec.json.encode(fields))))

    session = Session(api, account, Transport(send), "fuzz", VOICES, Settings())
    async with asyncio.timeout(60):
        await session.begin()
        for line in lines[:16]:
            await session.receive(line.decode("utf-8", "replace"))
        await session.close()
    assert INTERNAL not in intake.metrics.codes
    assert not intake.held.total
    assert not client.open_requests

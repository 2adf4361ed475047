"""Messages that cost more than their size: in time, in memory, and while nobody has processed them."""

import asyncio
import base64
import gzip
import json
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from starlette.requests import Request
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError

from gateway.dispatch.registry import StageRegistry
from gateway.fairness.quota import MemoryBudget
from gateway.http import body
from gateway.http.body import _unpacked, find
from gateway.http.fields import convert
from gateway.http.openai import messages, responses, strings
from gateway.http.openai.kept_answers import KeptAnswers
from gateway.http.openai.messages import Message, joined_results
from gateway.http.realtime.conversation import MAX_ITEMS, RealtimeConversation
from gateway.http.realtime.events import ClientEvent
from gateway.http.realtime.items import Item, Recorded, read_item, sound_item
from gateway.http.realtime.responses import Responses
from gateway.http.realtime.session import Session
from gateway.http.realtime.transcription import Transcriber, TranscriptionRules
from gateway.http.websocket import BoundedWebSocket
from gateway.input.prompt import PromptBuilder
from gateway.tcp import incoming
from gateway.validation import Validator
from omnirelay.content import AudioPart, ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError, PromptTooLongError
from omnirelay.protocol import MAX_PIECE_BYTES, GenerateRequest, Piece
from shared.config import MediaConfig
from shared.http.protocol import READ_BYTES, BoundedProtocol
from tests.gateway.bench import Bench, Configure, Patch, RawClient, serves
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway
from tests.gateway.realtime import TONE, idle


@pytest.mark.timeout(60)
def test_a_name_like_a_message_of_an_error_is_not_searched() -> None:
    """65,536 times in one name it would take an hour: 4,000 times took 13 s."""
    fields = {"role": "user", "content": "x", "matching regex '" * 65_536: 1}
    with pytest.raises(InvalidRequestError, match="unknown field"):
        convert(fields, Message, "messages[0]")


def test_results_of_tools_are_joined_once(monkeypatch: Patch) -> None:
    """One by one, 2,047 results behind one of 4 MB took 14 s."""
    made: list[str] = []

    def make(role: str, content: str) -> ChatMessage:
        made.append(content)
        return ChatMessage("user", content)

    monkeypatch.setattr(messages, "ChatMessage", make)
    results = [ChatMessage("user", str(number)) for number in range(100)]
    asked = [Message(role="user"), *[Message(role="tool")] * 100, Message(role="user")]
    question = ChatMessage("user", "and?")
    joined = joined_results(asked, [question, *results, question])
    assert joined == [question, ChatMessage("user", "\n".join(map(str, range(100)))), question]
    assert len(made) == 1


def test_quotes_are_not_searched_one_by_one(monkeypatch: Patch) -> None:
    """100 MiB of them kept the thread that parses for a minute."""
    searches = count()
    monkeypatch.setattr(strings, "find", lambda *given: (next(searches), find(*given))[1])
    monkeypatch.setattr(strings, "MAX_STRINGS", 100)
    assert strings.parse(bytearray(b'{"":"%b"}' % (b'\\"' * 2**15)), 1).values == {"": '"' * 2**15}
    strings.parse(bytearray(b'{"":[%b0]}' % (b'"",' * 2**15)), 1)
    assert next(searches) < 200


def test_the_beginning_of_a_body_is_searched_for_half_a_character(monkeypatch: Patch) -> None:
    """All of 32 MB stopped the gateway for 3 s."""
    pattern = mock.Mock()
    monkeypatch.setattr(body, "LONE_SURROGATE", pattern)
    cut = bytearray(b'{"a": "' + b"x" * 2**20)
    with pytest.raises(InvalidRequestError):
        body.read_object(cut)
    pattern.search.assert_called_once_with(cut, 0, body.SEARCHED)


async def test_what_follows_a_packed_body_is_not_kept() -> None:
    """12 MB of it kept the event loop for 10 s."""
    pieces = iter([gzip.compress(b"{}"), b"x", b"x"])

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    request = Request({"type": "http", "headers": [(b"content-encoding", b"gzip")]}, receive)
    with pytest.raises(InvalidRequestError, match="one whole"):
        _ = [each async for each in _unpacked(request)]
    assert list(pieces) == [b"x"]


def test_kept_messages_without_text_count_with_what_they_take() -> None:
    message = ChatMessage("user", [TextPart("") for _ in range(1000)])
    assert responses._size(message) >= 1000 * (sys.getsizeof(TextPart("")) + 8)
    assert responses._size(ChatMessage("user", "")) >= sys.getsizeof(ChatMessage("user", ""))


async def test_schemas_of_functions_are_checked_off_the_event_loop(
    web: HttpBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """250 KB of them, as lists in a list, stopped the gateway for 0.4 s."""
    checkers = set[threading.Thread]()

    def check(schema: str, obeyed: bool = True) -> None:
        checkers.add(threading.current_thread())

    monkeypatch.setattr("gateway.input.tools.require_feasible", check)
    monkeypatch.setattr("gateway.http.realtime.settings.require_feasible", check)
    parameters = {"type": "object", "description": "x" * 2**15}
    function = {"name": "f", "parameters": parameters}
    settings = {"tools": [{"type": "function", **function}], "tool_choice": "required"}
    session = {"type": "realtime", "output_modalities": ["text"], **settings}
    tools = [{"type": "function", "function": function}]
    await web.post(modalities=["text"], tools=tools, tool_choice="required")
    await web.http.post("/v1/responses", json={"model": "omnirelay", "input": "Hi", **settings})
    secret = (await web.http.post("/v1/realtime/client_secrets", json={"session": session})).json()["value"]
    headers = {"Authorization": f"Bearer {secret}"}
    url = web.url.replace("http:", "ws:") + "/v1/realtime"
    async with connect(url, additional_headers=headers) as socket:
        for event in ({"type": "session.update", "session": session}, {"type": "response.create"}):
            await socket.send(json.dumps(event))
        while "response.done" not in str(await socket.recv()):
            pass
    # Bodies on one thread, which clients use in turn.
    assert sum(each.name.startswith("parsing") for each in checkers) == 1
    assert threading.main_thread() not in checkers


VALUES = [
    *(None, True, 1, -1, 200, 2**12, 2**20, 2**40, -100, -(2**12), -(2**20), -(2**40), 1.5),
    *("", "x" * 31, "x" * 200, "x" * 2**10, "x" * 2**17, b"", b"x" * 2**10, b"x" * 2**17),
    *(msgspec.msgpack.Ext(1, b"x" * size) for size in (1, 2, 4, 8, 16, 3, 2**10, 2**17)),
]
"""One of each form but lists and maps, which their members follow."""


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (VALUES, len(VALUES) + 1),
        ([VALUES] * 20, 20 * (len(VALUES) + 1) + 1),
        ([None] * 2**17, 2**17 + 1),
        (dict.fromkeys(range(10), 0), 21),
        (dict.fromkeys(range(2**10), 0), 2**11 + 1),
        (dict.fromkeys(range(2**17), 0), 2**18 + 1),
    ],
)
def test_values_of_a_message_are_counted(monkeypatch: Patch, value: object, count: int) -> None:
    message = bytearray(msgspec.msgpack.encode(value))
    for most, few in ((count, True), (count - 1, False)):
        monkeypatch.setattr(incoming, "MAX_VALUES", most)
        assert incoming._has_few_values(message) is few


@pytest.mark.parametrize("as_pieces", [False, True])
async def test_a_tcp_message_of_very_many_values_is_refused(
    tcp: Bench, raw: RawClient, as_pieces: bool
) -> None:
    """100 MiB of a field that repeats stopped the gateway for a second."""
    field = msgspec.msgpack.encode("chunk_frames") + b"\xdc\x04\x00" + b"\x01" * 1024
    request = b"\xde" + (300).to_bytes(2, "big") + field * 300
    assert msgspec.msgpack.decode(request, type=GenerateRequest).chunk_frames == [1] * 1024

    if as_pieces:
        for at in range(0, len(request), MAX_PIECE_BYTES):
            data = request[at : at + MAX_PIECE_BYTES]
            raw.say(Piece(1, at, data, last=at + len(data) == len(request)))
        _, _, message = await raw.told()
    else:
        raw.say_bytes(
            b"\x83" + b"".join(map(msgspec.msgpack.encode, ("type", "submit", "id", 1, "request"))) + request
        )
        message = (await raw.refused()).message
    assert "values" in message
    await serves(tcp)


class Compared(str):
    """A client's name that counts comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Compared.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_keeping_an_answer_does_not_look_at_all_others() -> None:
    answers = KeptAnswers[str](2**26)
    for number in range(1000):
        answers.keep(Compared(f"client {number % 7}"), str(number), "", 1)
    assert Compared.compared < 50_000


@pytest.mark.parametrize("kind", ["chunks", "frames"])
async def test_little_of_a_stream_is_read_at_once(web: HttpBench, monkeypatch: Patch, kind: str) -> None:
    """256 KiB of chunks or frames of a byte stopped the gateway for half a second."""
    sizes = []
    for protocol in (BoundedProtocol, BoundedWebSocket):

        def count(self: object, data: bytes, take: Callable[..., None] = protocol.data_received) -> None:
            sizes.append(len(data))
            take(self, data)

        monkeypatch.setattr(protocol, "data_received", count)
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    upgrade += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    head, body = {
        "chunks": ("POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n", b"1\r\n \r\n"),
        "frames": (f"GET /v1/realtime HTTP/1.1\r\n{upgrade}", b"\x89\x80\0\0\0\0"),
    }[kind]

    host, port = web.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**20)
    writer.write(f"{head}Host: {host}\r\n\r\n".encode())
    if kind == "chunks":
        writer.write(body * 20_000 + b"0\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"400"
    else:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(body * 20_000)
        async with asyncio.timeout(60):
            while sum(sizes) < 20_000 * len(body):
                await asyncio.sleep(0.01)
    writer.transport.abort()
    assert sum(sizes) >= 20_000 * len(body)
    assert max(sizes) <= READ_BYTES


async def test_a_message_has_a_bounded_number_of_fragments(configure: Configure, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.http.websocket.MAX_FRAGMENTS", 16)

    async with (
        http_bench(configure(http_gateway())) as b,
        connect(b.url.replace("http", "ws") + "/v1/realtime") as client,
    ):
        await client.recv()
        await client.send(iter(["{"] + [" "] * 10 + ["}"]))
        assert '"error"' in await client.recv()
        with suppress(ConnectionClosedError):
            await client.send(iter(["{"] + [" "] * 10_000 + ["}"]))
        await client.wait_closed()
        assert client.close_code == 1009


def test_a_text_that_is_too_long_by_far_is_not_tokenized_to_its_end(
    configure: Configure, checkpoint_dir: Path, monkeypatch: Patch
) -> None:
    """Four million emoji kept all others from their prompts for 6 s."""
    prompts, texts = PromptBuilder(checkpoint_dir), list[str]()
    config = configure({"limits": {"max_prompt_tokens": 1000}}).gateway
    validator, tokenize = Validator(config, StageRegistry(1, 1), prompts), prompts._tokenize

    def count(text: str) -> list[int]:
        texts.append(text)
        return tokenize(text)

    monkeypatch.setattr(prompts, "_tokenize", count)
    for request in (
        GenerateRequest(prompt_text="\U0001f600" * 100_000),
        GenerateRequest(messages=[ChatMessage("user", "\U0001f600" * 100_000)]),
    ):
        with pytest.raises(PromptTooLongError, match="or more"):
            validator.prompt(request)
    assert sum(map(len, texts)) == 2 * 2000


def test_a_conversation_that_is_cut_weighs_each_item_once(monkeypatch: Patch) -> None:
    """512 items of 64 parts that gave way to a recording stopped the gateway for 8 s."""
    held = MemoryBudget(2**30, lambda: 1).of("a")
    conversation, weighed = RealtimeConversation(MediaConfig(max_request_bytes=2**20), held), 0
    for _ in range(MAX_ITEMS - 1):
        conversation.add(read_item({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, ""))
    wav = bytearray(2**20 - 100)
    conversation.add(sound_item(wav, "last", Recorded([AudioPart(data=memoryview(wav))])))
    weight = Item.weight.fget  # type: ignore[attr-defined]

    def weigh(item: Item) -> int:
        nonlocal weighed
        weighed += 1
        size: int = weight(item)
        return size

    monkeypatch.setattr(Item, "weight", property(weigh))
    deleted = conversation.make_room()
    assert 300 < len(deleted) < MAX_ITEMS
    assert weighed == MAX_ITEMS


@pytest.mark.parametrize("alone", [True, False])
async def test_a_deleted_recording_does_not_wait_for_its_transcript(alone: bool) -> None:
    """64 of 12 MiB were kept, and not counted, of each session."""
    conversation = RealtimeConversation(MediaConfig(), MemoryBudget(2**30, lambda: 1).of("a"))
    unused: Any = None
    transcriber = Transcriber(unused, unused, unused, conversation, unused, unused)
    item = sound_item(bytearray(), "x", Recorded([AudioPart(data=memoryview(bytes(100)))]))
    conversation.add(item)
    await transcriber.add(item, TranscriptionRules(), alone)
    assert item.memory > 100
    conversation.remove("x")
    assert item.memory < 100
    await transcriber.close()


MIB = 2**20
ASK: dict[str, Any] = {"type": "response.create", "model": "omnirelay", "input": "Hi"}


def uploads(b: Bench) -> int:
    return b.process._server._uploads.used


def held(b: Bench) -> int:
    return b.process.gateway.held.total


async def dial(b: HttpBench, path: str) -> ClientConnection:
    return await connect(b.url.replace("http:", "ws:") + path, ping_interval=None, max_size=None)


async def say(socket: ClientConnection, **message: Any) -> int:
    text = json.dumps(message)
    await socket.send(text)
    return len(text)


async def test_small_uploads_of_one_connection_are_counted_together(tcp: Bench, raw: RawClient) -> None:
    """64 of 256 KiB each were not, on each of 410 connections."""
    for number in range(40):
        raw.say(Piece(number, 0, bytes(MAX_PIECE_BYTES)))
    await until(lambda: uploads(tcp) == 40 * MAX_PIECE_BYTES)
    await raw.close()
    await until(lambda: uploads(tcp) == 0)


async def test_responses_that_wait_for_another_are_counted(web: HttpBench) -> None:
    socket = await dial(web, "/v1/responses")
    await say(socket, **ASK)
    first = await web.stages.request(0)
    # One waits, one waits to wait, and one is not taken.
    sizes = [await say(socket, **ASK, instructions="x" * MIB) for _ in range(3)]
    await until(lambda: held(web) == sum(sizes[:2]))
    # Its head may have come with the end of the one before.
    await until(lambda: uploads(web) > sizes[2] - READ_BYTES)
    socket.transport.abort()
    await web.stages.answer(first, web.encode("Hello"))
    await idle(web)
    await until(lambda: uploads(web) == 0)


async def test_a_response_for_which_memory_is_short_is_refused(configure: Configure) -> None:
    config = configure(http_gateway(), {"max_request_bytes": MIB, "max_item_bytes": MIB}, held_bytes=2 * MIB)
    async with http_bench(config) as b:
        socket = await dial(b, "/v1/responses")
        await say(socket, **ASK)
        first = await b.stages.request(0)
        for _ in range(2):
            await say(socket, **ASK, instructions="x" * (3 * MIB // 2))
        while (event := json.loads(await socket.recv()))["type"] != "error":
            pass
        assert event["code"] == "busy"
        await b.stages.answer(first, b.encode("Hello"))
        await socket.close()
        await idle(b)


async def test_a_message_that_nobody_takes_is_dropped_where_memory_is_short(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.fairness.uploads.RECENT_S", 0.1)
    config = configure(http_gateway(), {"max_request_bytes": MIB, "max_item_bytes": MIB}, held_bytes=3 * MIB)
    async with http_bench(config) as b:
        socket = await dial(b, "/v1/responses")
        await say(socket, **ASK)
        first = await b.stages.request(0)
        for size in (1, 1, 2 * MIB):
            await say(socket, **ASK, instructions="x" * size)
        room = b.process._server._uploads
        await until(lambda: room.used > MIB and all(each.speed() < 2**17 for each in room._uploads))
        other = await RawClient.connect(b)
        for at in range(0, 2 * MIB, MAX_PIECE_BYTES):
            other.say(Piece(1, at, bytes(MAX_PIECE_BYTES)))
        await until(lambda: room.used == 2 * MIB)
        with suppress(ConnectionClosed):
            while True:
                await socket.recv()
        await b.stages.answer(first, b.encode("Hello"))
        await idle(b)


async def test_what_is_to_be_tokenized_is_counted_until_its_client_leaves(web: HttpBench) -> None:
    gateway = web.process.gateway
    await gateway.intake._thread._turn.enter("another")
    sound = {"type": "input_audio", "input_audio": {"data": "A" * 2**17, "format": "wav"}}
    body = {"messages": [{"role": "user", "content": [sound]}]}
    asked = asyncio.create_task(web.http.post("/tokenize", json=body))
    await until(lambda: gateway.held.total == 2**17 // 4 * 3)
    asked.cancel()
    await until(lambda: gateway.held.total == 0)
    gateway.intake._thread._turn.leave("another")


async def test_texts_that_wait_to_be_spoken_are_counted(web: HttpBench) -> None:
    socket = await dial(web, "/v1/audio/speech/stream")
    await say(socket, type="session.config")
    await say(socket, type="input.text", text="A sentence that is long enough to be spoken. ")
    await web.stages.request(0)
    text = "\N{SNOWMAN WITHOUT SNOW}" * 30_000
    for _ in range(3):
        await say(socket, type="input.text", text=text)
    await until(lambda: held(web) == 3 * 4 * len(text))
    socket.transport.abort()
    await idle(web)


async def test_an_event_of_a_session_is_counted_while_it_is_processed(
    web: HttpBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, seen = Session.handle, list[int]()

    async def watched(session: Session, event: ClientEvent) -> None:
        seen.append(held(web))
        await handle(session, event)

    monkeypatch.setattr(Session, "handle", watched)
    socket = await dial(web, "/v1/realtime")
    part = {"type": "input_text", "text": "x" * MIB}
    item = {"type": "message", "role": "user", "content": [part]}
    size = await say(socket, type="conversation.item.create", item=item)
    while json.loads(await socket.recv())["type"] != "conversation.item.done":
        pass
    assert seen == [size]
    # The item has its text twice: for the model, and for clients.
    await until(lambda: held(web) < 2 * MIB + 100)
    await socket.close()
    await idle(web)


async def test_a_recording_that_does_not_become_an_item_is_returned(
    web: HttpBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends while the answer is interrupted that the recording interrupts."""
    sessions, waiting = list[Session](), asyncio.Event()
    begin = Session.begin

    async def begun(session: Session, told: dict[str, Any] | None = None) -> None:
        sessions.append(session)
        await begin(session, told)

    async def interrupt(_: Responses) -> None:
        waiting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Session, "begin", begun)
    monkeypatch.setattr(Responses, "interrupt", interrupt)
    socket = await dial(web, "/v1/realtime")
    await say(socket, type="input_audio_buffer.append", audio=base64.b64encode(TONE).decode())
    await say(socket, type="input_audio_buffer.commit")
    await waiting.wait()
    assert held(web)
    sessions[0].too_slow.set()
    await idle(web)

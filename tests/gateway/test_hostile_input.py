"""What is malformed, hostile or slow is refused, and harms nobody else; no request holds code or a place."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import msgspec
import pytest
import zmq

from gateway.input.tools import CallParser
from gateway.process import GatewayProcess
from omnirelay import errors
from omnirelay.content import ChatMessage, ImagePart
from omnirelay.events import DoneEvent, ErrorEvent
from omnirelay.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    GenerateRequest,
    Hello,
    Piece,
    Refusal,
    Reply,
    Submit,
    pack,
)
from omnirelay.tools import Function, Tool
from omnirelay.version import version
from shared.messages import (
    Abort,
    AudioChunk,
    ControlToStage,
    TalkerInput,
    TextDelta,
    ThinkerInput,
    ThinkRequest,
    Token2WavInput,
)
from shared.messages.payloads import Blob
from shared.transport.control import ControlClient
from shared.transport.wire import VERSION_BYTE, WIRE_VERSION, Frame, encode
from tests.gateway.bench import HI, Bench, Configure, Log, Patch, RawClient, bench, serves, submit
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway


async def test_other_version_is_told_both_versions(tcp: Bench, monkeypatch: Patch) -> None:
    raw = await RawClient.connect(tcp, greet=False)
    raw.say(Hello(PROTOCOL_VERSION + 1))
    refused = await raw.refused()
    assert refused.code == "version_unsupported"
    assert str(PROTOCOL_VERSION + 1) in refused.message
    assert await raw.closed()
    monkeypatch.setattr("omnirelay.client.transport.connection.PROTOCOL_VERSION", 99)
    with pytest.raises(errors.VersionError, match="99"):
        await tcp.client().connect()
    monkeypatch.undo()
    await serves(tcp)


async def ended(raw: RawClient) -> str:
    """The code of the next error of a request."""
    while not (isinstance(heard := await raw.hear(), Reply) and isinstance(heard.event, ErrorEvent)):
        pass
    return heard.event.code


async def flooded(b: Bench) -> RawClient:
    """A client that reads nothing of much speech, until its request is dropped."""
    raw = await RawClient.connect(b)
    raw.say(submit(1, HI))
    request = await b.stages.request(0)
    for seq in range(64):
        await b.stages.audio(request.request_id, seq, bytes(2**18))
    await b.stages.aborted(request.request_id)
    return raw


async def test_client_must_begin_with_hello(tcp: Bench, monkeypatch: Patch) -> None:
    for first in (pack(Cancel(1)), b"\0\0\0\1\xc1", b""):
        with monkeypatch.context() as short:
            short.setattr("gateway.tcp.connection.HELLO_TIMEOUT_S", 0.05)
            raw = await RawClient.connect(tcp, greet=False)
            raw.writer.write(first)
            assert isinstance(await raw.hear(), Refusal)
        assert await raw.closed()
    await serves(tcp)


async def test_an_upload_that_does_not_begin_at_its_beginning_is_answered(tcp: Bench, raw: RawClient) -> None:
    for last in (False, True):
        raw.say(Piece(7, 5, b"x", last=last))
        number, code, message = await raw.told()
        assert (number, code) == (7, "invalid_request")
        assert "a piece begins at 5, but 0 bytes have come" in message
        if not last:
            # The remaining pieces of an upload that has ended are dropped.
            raw.say(Piece(7, 6, b"x"))
            raw.say(Piece(7, 7, b"x", last=True))
    raw.say(Cancel(7))
    raw.say(submit(8, HI))
    assert await raw.accepted() == 8
    raw.say(Piece(8, 5, b"x"))
    assert "request 8 is still being answered" in (await raw.refused()).message


async def test_pieces_of_uploads_long_ended_are_forgotten(
    tcp: Bench, raw: RawClient, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("gateway.tcp.connection.MAX_ENDED_EARLY", 2)

    for number in range(3):
        raw.say(Piece(number, 5, b"x"))
        await raw.told()
    (connection,) = tcp.process._server._connections.values()
    assert list(connection._ended_early) == [1, 2]


async def test_wrong_messages_end_only_themselves(tcp: Bench, raw: RawClient) -> None:
    raw.say(submit(1, HI))
    request = await tcp.stages.request(0)
    for body in (b"\xc1", b"\x81\xa4type\xa7unknown", msgspec.msgpack.encode(Hello(1))):
        raw.say_bytes(body)
    raw.say(submit(1, HI))
    raw.say(Submit(2, msgspec.Raw(msgspec.msgpack.encode({"speach": True}))))
    raw.say(Submit(3, msgspec.Raw(msgspec.msgpack.encode({"messages": [{"role": "x", "content": 1}]}))))
    refused: list[str] = []
    wrong: list[str] = []
    while len(refused) < 4 or len(wrong) < 2:
        heard = await raw.hear()
        if isinstance(heard, Refusal):
            refused.append(heard.code)
        elif isinstance(heard, Reply) and isinstance(heard.event, ErrorEvent):
            wrong.append(heard.event.code)
    assert set(refused) == {"message_invalid"}
    assert set(wrong) == {"invalid_request"}
    await tcp.stages.answer(request, tcp.encode("Hello"))
    while not (isinstance(heard := await raw.hear(), Reply) and isinstance(heard.event, DoneEvent)):
        pass
    assert heard.event.text == "Hello"
    assert tcp.process.status().refused == {"message_invalid": 4}


async def test_cancel_before_acceptance(tcp: Bench, raw: RawClient) -> None:
    raw.writer.write(pack(submit(1, HI)) + pack(Cancel(1)) + pack(Cancel(77)))
    assert await ended(raw) == "cancelled"
    await until(lambda: tcp.counts["cancelled"] == 1)
    await serves(tcp)


async def test_slow_client_loses_its_requests_only(configure: Configure) -> None:
    async with bench(configure(client_backlog_bytes=2**20)) as b:
        raw = await flooded(b)
        await until(lambda: b.counts["failed"] == 1)
        await serves(b)
        assert await ended(raw) == "client_too_slow"


async def test_client_that_reads_nothing_is_hung_up_on(tcp: Bench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.tcp.connection.STALL_S", 0.2)

    raw = await flooded(tcp)
    await until(lambda: tcp.counts["cancelled"] == 1)
    assert len(await raw.reader.read()) < 64 * 2**18
    raw.writer.transport.abort()
    await serves(tcp)


@pytest.mark.parametrize("keyed", [False, True])
async def test_functions_are_described_in_turn_and_for_nobody_without_a_key(
    configure: Configure, keys: str, keyed: bool, monkeypatch: Patch
) -> None:
    described, go_on = list[str](), threading.Event()

    def describe(request: GenerateRequest) -> tuple[GenerateRequest, CallParser]:
        described.append(request.tools[0].function.name)
        go_on.wait(30)
        return HI, CallParser()

    monkeypatch.setattr("gateway.tcp.connection.with_tools", describe)
    question = ChatMessage("user", [ImagePart(data=memoryview(b"x" * 1000))])
    async with bench(configure({"api_keys": keys} if keyed else None)) as b:
        raws = [await RawClient.connect(b) for _ in "ab"]
        for raw, name in zip(raws, "ab", strict=True):
            for number in range(3):
                tools = [Tool("function", Function(name))]
                raw.say(submit(number, GenerateRequest(messages=[question], tools=tools)))
            if keyed:
                assert (await raw.told())[1] == "unauthenticated"
            await until(lambda: keyed or described)
        await until(lambda: keyed or b.process.gateway.held.total == 6000)
        go_on.set()
        await until(lambda: len(described) == (0 if keyed else 6))
        assert described[1:3] == ([] if keyed else ["b", "a"])


async def test_client_that_reads_a_long_frame_slowly_is_not_hung_up_on(
    tcp: Bench, raw: RawClient, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("gateway.tcp.connection.STALL_S", 1.0)
    raw.say(submit(1, msgspec.structs.replace(HI, streaming=False)))
    request = await tcp.stages.request(0)
    await tcp.stages.audio(request.request_id, 0, bytes(size := 2**25))
    while size > 0:
        size -= len(await raw.reader.readexactly(2**17))
        await asyncio.sleep(0.01)


async def test_client_that_only_writes_is_not_read_without_end(configure: Configure) -> None:
    async with bench(configure(max_queued_per_client=2)) as b:
        raw = await RawClient.connect(b)
        wrong = pack(Submit(5, msgspec.Raw(msgspec.msgpack.encode({"x" * 2000: 1}))))

        async def write_without_end() -> None:
            while True:
                raw.writer.write(wrong * 100)
                await raw.writer.drain()

        writing = asyncio.create_task(write_without_end())
        # Refused and not read by the client, they stop counting when the gateway stops reading.
        seen = -1
        while seen != (seen := b.counts["failed"] + sum(b.process.status().refused.values())) or not seen:
            await asyncio.wait([writing], timeout=0.3)
        assert not writing.done()
        await serves(b)
        writing.cancel()
        raw.writer.transport.abort()


async def test_stages_may_say_nonsense(tcp: Bench) -> None:
    lying = AudioChunk(request_id="x", seq=0, samples=5, data=Blob(bytes(8)))
    good = encode(TextDelta(request_id="gone", seq=0, token_ids=[1]))
    nonsense: list[list[Frame]] = [
        [b""],
        [VERSION_BYTE],
        [bytes([WIRE_VERSION + 1]) + bytes(good[0])[1:]],
        [*good, b"extra"],
        [bytes(good[0])[:-1]],
        encode(lying),
        encode(Abort(request_id="x")),
    ]
    for frames in nonsense:
        await tcp.stages.events.send_multipart(frames)
    await tcp.stages.events.send_multipart(good)
    thinker = tcp.stages.control["thinker"]
    await thinker.send_multipart([VERSION_BYTE + b"\xc1"])
    await thinker.send_multipart(encode(tcp.stages.heartbeat("talker")))
    await until(lambda: sum(tcp.process.status().refused.values()) == len(nonsense) + 2)
    await until(lambda: tcp.process.status().dropped_events == 1)
    await serves(tcp)


async def test_a_stage_of_another_version_is_told_once_here_and_there(
    configure: Configure, caplog: Log
) -> None:

    with caplog.at_level(logging.WARNING):
        async with bench(configure()) as b:
            other = ControlClient(zmq.Context.instance(), b.config.gateway.control, "thinker.other")
            beat = ControlClient(zmq.Context.instance(), b.config.gateway.control, "thinker.other.heartbeat")
            await until(lambda: other.socket.poll(0, zmq.POLLOUT))
            message = [bytes([WIRE_VERSION - 1]) + bytes(encode(b.stages.heartbeat("thinker"))[0])[1:]]
            before = b.process.status().refused.get("version_unsupported", 0)
            for _ in range(20):
                await until(lambda: beat.socket.poll(0, zmq.POLLOUT))
                beat.socket.send_multipart(message)
            await until(lambda: b.process.status().refused.get("version_unsupported") == before + 20)
            await until(lambda: other.socket.poll(0))
            frames = other.socket.recv_multipart()
            assert frames[0][0] == WIRE_VERSION
            assert not other.socket.poll(100)
            assert not beat.socket.poll(0)
            other.close()
            beat.close()
            await serves(b)
    (line,) = [line for line in caplog.messages if "version_unsupported" in line]
    assert "thinker.other" in line
    assert f"version {WIRE_VERSION - 1}, this build speaks {WIRE_VERSION}" in line
    assert line.endswith(f"OmniRelay, this is {version()}")


async def test_addresses_in_use_are_named(web: HttpBench, configure: Configure) -> None:
    with pytest.raises(errors.AddressInUseError, match=web.config.gateway.events):
        GatewayProcess(web.config)
    for key in ("listen", "http"):
        other = configure({key: getattr(web.config.gateway, key)})
        with pytest.raises(errors.AddressInUseError, match=rf"gateway\.{key}") as raised:
            await GatewayProcess(other).start()
        assert getattr(web.config.gateway, key) in str(raised.value)
    with pytest.raises(errors.ConfigError, match=r"gateway\.http"):
        await GatewayProcess(configure({"http": "tcp://192.0.2.1:8000"})).start()
    await serves(web)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[int, list[object]]]:
    """A port of this machine where nobody must connect, and who did."""
    connected: list[object] = []

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer)
        writer.close()

    async with await asyncio.start_server(take, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], connected


async def test_no_request_connects_anywhere(configure: Configure) -> None:
    """Addresses come from the configuration and from members of the stack, never from a request."""

    async with listening() as (port, connected), http_bench(configure(http_gateway())) as b:
        place = {"remote_host": "127.0.0.1", "remote_port": port, "do_remote_prefill": True}
        address = f"tcp://127.0.0.1:{port}"
        fields: list[dict[str, Any]] = [
            {"kv_transfer_params": place},
            {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 1},
            {"disaggregated_params": place},
            {"ec_transfer_params": place},
            {"route": {"talker": address, "token2wav": address}},
            {"inbox": address},
            {"callback_url": f"http://127.0.0.1:{port}/"},
        ]
        for each in fields:
            assert (await b.post(**each)).status_code == 400, each
        media = [
            {"type": kind, kind: {"url": f"{scheme}://127.0.0.1:{port}/"}}
            for kind in ("image_url", "video_url", "audio_url")
            for scheme in ("http", "https", "ftp", "tcp")
        ]
        for part in media:
            messages = [{"role": "user", "content": [part]}]
            assert (await b.post(messages=messages)).status_code == 400, part
        raw = await RawClient.connect(b)
        request = msgspec.msgpack.encode({"messages": [{"role": "user", "content": "Hi"}], **fields[4]})
        raw.say(Submit(1, msgspec.Raw(request)))
        assert (await raw.hear()).event.code == "invalid_request"  # type: ignore[union-attr]
        headers = {"X-Forwarded-Host": f"127.0.0.1:{port}", "X-Omnirelay-Inbox": address}
        forwarded = await b.http.get(f"http://127.0.0.1:{b.address[1]}/v1/models", headers=headers)
        assert forwarded.status_code == 200
        assert b.stages.requests == []
        assert connected == []


def fields_of(kind: type[msgspec.Struct]) -> Iterator[str]:
    """The names of a message's fields, those of the structs in it among them."""
    for field in msgspec.structs.fields(kind):
        yield field.encode_name
        for part in (field.type, *get_args(field.type)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from fields_of(part)


@pytest.mark.parametrize(
    "union", [GenerateRequest, ThinkerInput, TalkerInput, Token2WavInput, ControlToStage]
)
def test_no_message_of_a_request_has_a_place_for_an_address(union: Any) -> None:
    kinds = [union] if isinstance(union, type) else get_args(union)
    names = {name for kind in kinds for name in fields_of(kind)}
    assert names
    if union in (ThinkerInput, ThinkRequest):
        assert "prompt_token_ids" in names
    words = ("address", "host", "port", "endpoint", "inbox", "url", "path", "callback")
    assert not [name for name in names if name in words or name.endswith(tuple(f"_{word}" for word in words))]

"""What is malformed, hostile or slow is refused, and harms nobody else."""

import asyncio
import logging
import os

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnirelay import AsyncClient, ChatMessage, GenerateRequest, audio, errors, image
from omnirelay.events import DoneEvent, ErrorEvent
from omnirelay.protocol import (
    PROTOCOL_VERSION,
    Cancel,
    ClientMessage,
    Hello,
    Piece,
    Refusal,
    Reply,
    Submit,
    pack,
)
from omnirelay.version import version
from shared.messages import Abort, AudioChunk, TextDelta
from shared.messages.payloads import Blob
from shared.transport.control import ControlClient
from shared.transport.wire import VERSION_BYTE, WIRE_VERSION, Frame, encode
from tests.gateway.bench import Bench, Configure, bench
from tests.gateway.fake_stages import until
from tests.gateway.raw_client import HI, RawClient, serves, submit


async def test_other_version_is_told_both_versions(tcp: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = await RawClient.connect(tcp, greet=False)
    raw.say(Hello(PROTOCOL_VERSION + 1))
    refused = await raw.hear()
    assert isinstance(refused, Refusal)
    assert refused.code == "version_unsupported"
    assert str(PROTOCOL_VERSION + 1) in refused.message
    assert await raw.closed()
    await raw.close()
    monkeypatch.setattr("omnirelay.client.transport.connection.PROTOCOL_VERSION", 99)
    with pytest.raises(errors.VersionError, match="99"):
        await tcp.client().connect()
    monkeypatch.undo()
    await serves(tcp)


async def test_client_must_begin_with_hello(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.tcp.connection.HELLO_TIMEOUT_S", 0.05)

    async with bench(configure()) as b:
        for first in (pack(Cancel(1)), b"\0\0\0\1\xc1", b""):
            raw = await RawClient.connect(b, greet=False)
            raw.writer.write(first)
            assert isinstance(await raw.hear(), Refusal)
            assert await raw.closed()
            await raw.close()
        await serves(b)


async def test_oversize_length_is_refused_before_it_is_read(configure: Configure) -> None:
    async with bench(configure(media={"max_request_bytes": 1000}, request_bytes=1000)) as b:
        raw = await RawClient.connect(b)
        raw.say(submit(1, HI))
        request = await b.stages.request(0)
        raw.writer.write(b"\xff\xff\xff\xff")
        while not isinstance(heard := await raw.hear(), Refusal):
            pass
        assert "4294967295 bytes, at most 1000" in heard.message
        await b.stages.aborted(request.request_id)
        await raw.close()
        await serves(b)


async def test_an_upload_that_does_not_begin_at_its_beginning_is_answered(tcp: Bench) -> None:
    raw = await RawClient.connect(tcp)
    for last in (False, True):
        raw.say(Piece(7, 5, b"x", last=last))
        reply = await raw.hear()
        assert isinstance(reply, Reply)
        assert isinstance(reply.event, ErrorEvent)
        assert (reply.id, reply.event.code) == (7, "invalid_request")
        assert "a piece begins at 5, but 0 bytes have come" in reply.event.message
        if not last:
            # The remaining pieces of an upload that has ended are dropped.
            raw.say(Piece(7, 6, b"x"))
            raw.say(Piece(7, 7, b"x", last=True))
    raw.say(Cancel(7))
    raw.say(submit(8, HI))
    reply = await raw.hear()
    assert isinstance(reply, Reply)
    assert reply.id == 8
    raw.say(Piece(8, 5, b"x"))
    refused = await raw.hear()
    assert isinstance(refused, Refusal)
    assert "request 8 is still being answered" in refused.message
    await raw.close()


async def test_pieces_of_uploads_long_ended_are_forgotten(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tcp.connection.MAX_ENDED_EARLY", 2)

    async with bench(configure()) as b:
        raw = await RawClient.connect(b)
        for number in range(3):
            raw.say(Piece(number, 5, b"x"))
            assert isinstance(await raw.hear(), Reply)
        (connection,) = b.process._server._connections.values()
        assert list(connection._ended_early) == [1, 2]
        await raw.close()


async def test_wrong_messages_end_only_themselves(tcp: Bench) -> None:
    raw = await RawClient.connect(tcp)
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
    await raw.close()


async def test_cancel_before_acceptance(tcp: Bench) -> None:
    raw = await RawClient.connect(tcp)
    raw.writer.write(pack(submit(1, HI)) + pack(Cancel(1)) + pack(Cancel(77)))
    while not (isinstance(heard := await raw.hear(), Reply) and hasattr(heard.event, "code")):
        pass
    assert heard.event.code == "cancelled"
    await until(lambda: tcp.counts["cancelled"] == 1)
    await raw.close()
    await serves(tcp)


async def test_slow_client_loses_its_requests_only(configure: Configure) -> None:
    async with bench(configure(client_backlog_bytes=2**20)) as b:
        raw = await RawClient.connect(b)
        raw.say(submit(1, HI))
        request = await b.stages.request(0)
        for seq in range(64):
            await b.stages.audio(request.request_id, seq, bytes(2**18))
        await b.stages.aborted(request.request_id)
        await until(lambda: b.counts["failed"] == 1)
        await serves(b)
        while not (isinstance(heard := await raw.hear(), Reply) and hasattr(heard.event, "code")):
            pass
        assert heard.event.code == "client_too_slow"
        await raw.close()


async def test_client_that_reads_nothing_is_hung_up_on(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tcp.connection.STALL_S", 0.2)

    async with bench(configure()) as b:
        raw = await RawClient.connect(b)
        raw.say(submit(1, HI))
        request = await b.stages.request(0)
        for seq in range(64):
            await b.stages.audio(request.request_id, seq, bytes(2**18))
        await b.stages.aborted(request.request_id)
        await until(lambda: b.counts["cancelled"] == 1)
        assert len(await raw.reader.read()) < 64 * 2**18
        raw.writer.transport.abort()
        await serves(b)


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


async def test_a_stage_of_another_version_is_named_once_here_and_told_once_there(
    configure: Configure, caplog: pytest.LogCaptureFixture
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


def fuzz_bytes() -> st.SearchStrategy[bytes]:
    seen = GenerateRequest(messages=[ChatMessage("user", [image(b"x"), audio("data:;base64,eA==")])])
    said: list[ClientMessage] = [Hello(1), Cancel(1), submit(1, HI), submit(1, seen)]
    message = st.sampled_from([pack(each)[4:] for each in said])
    broken = st.builds(
        lambda body, at, byte: body[:at] + bytes([byte]) + body[at + 1 :],
        message,
        st.integers(0, 120),
        st.integers(0, 255),
    )
    return st.one_of(st.binary(max_size=64), broken)


async def test_fuzzed_sockets_leave_the_gateway_serving(tcp: Bench) -> None:
    """One gateway for all examples: whatever they leave behind, the next must still be served."""

    loop = asyncio.get_running_loop()
    await asyncio.to_thread(fuzz, tcp, loop)
    await serves(tcp)
    assert tcp.process.status().ready


def fuzz(b: Bench, loop: asyncio.AbstractEventLoop) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.lists(fuzz_bytes(), max_size=4),
        st.lists(st.binary(max_size=40), min_size=1, max_size=4),
        st.booleans(),
    )
    def example(bodies: list[bytes], frames: list[bytes], greet: bool) -> None:
        asyncio.run_coroutine_threadsafe(attack(b, bodies, frames, greet), loop).result(10)

    example()


async def attack(b: Bench, bodies: list[bytes], frames: list[bytes], greet: bool) -> None:
    before = b.process.status().refused
    raw = await RawClient.connect(b, greet)
    for body in bodies:
        raw.say_bytes(body)
    raw.writer.write(os.urandom(3))
    await raw.close()
    await b.stages.events.send_multipart(frames)
    await b.stages.control["talker"].send_multipart(frames)
    total = sum(before.values()) + 2
    await until(lambda: sum(b.process.status().refused.values()) >= total)


async def test_addresses_in_use_are_named(configure: Configure) -> None:
    async with bench(configure()) as b:
        from gateway.process import GatewayProcess  # noqa: PLC0415

        with pytest.raises(errors.AddressInUseError, match=b.config.gateway.events):
            GatewayProcess(b.config)
        addresses = configure().gateway.model_copy(update={"listen": b.listen})
        other = GatewayProcess(b.config.model_copy(update={"gateway": addresses}))
        with pytest.raises(errors.AddressInUseError, match=b.listen):
            await other.start()
        await serves(b)


async def test_client_without_gateway(configure: Configure) -> None:
    client = AsyncClient(configure().gateway.listen)
    with pytest.raises(errors.GatewayUnreachableError, match="omnirelay up"):
        await client.connect()
    with pytest.raises(errors.GatewayUnreachableError):
        client.chat("Hi")
    with pytest.raises(errors.ConfigError):
        await AsyncClient("http://example").connect()

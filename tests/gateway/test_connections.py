"""Connections that are opened and not used: they end in time, and take no place from other addresses."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect

from gateway.access.places import Places, Proxies, holder_of
from gateway.http.guards import move
from omnirelay.errors import BusyError
from omnirelay.events import ErrorEvent
from omnirelay.protocol import (
    MAX_PIECE_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    GenerateRequest,
    Hello,
    Ping,
    Reply,
    StatusQuery,
    pack,
    parse_tcp,
)
from omnirelay.status import StatusReport
from shared.http import protocol
from tests.gateway.bench import Bench, Configure, Patch, RawClient, bench, submit
from tests.gateway.fake_stages import until
from tests.gateway.http_bench import HttpBench, http_bench, http_gateway
from tests.support.ports import free_ports

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
LIVE = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"
OTHER = ("127.0.0.2", 0)
"""An address of this machine that nobody else comes from."""


def watched_gateway(**changes: Any) -> dict[str, Any]:
    return http_gateway(monitor=f"tcp://127.0.0.1:{free_ports(1)[0]}", **changes)


def monitor_of(b: Bench) -> tuple[str, int]:
    return parse_tcp(b.config.gateway.monitor or "")


class Sockets:
    """Connections that a test opens, and what came on them."""

    def __init__(self) -> None:
        self.open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def connect(
        self, where: tuple[str, int], words: bytes = b"", source: tuple[str, int] | None = None
    ) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*where, local_addr=source)
        self.open.append((reader, writer))
        writer.write(words)
        return reader

    def alive(self) -> int:
        """How many the other side has not closed."""
        return sum(not reader.at_eof() and reader.exception() is None for reader, _ in self.open)


@asynccontextmanager
async def sockets() -> AsyncIterator[Sockets]:
    found = Sockets()
    try:
        yield found
    finally:
        for _, writer in found.open:
            writer.transport.abort()


async def is_served(reader: asyncio.StreamReader) -> bool:
    """Whether an answer comes, and not the end of the connection."""
    try:
        return (await reader.readline()).startswith(b"HTTP/1.1 200")
    except ConnectionResetError:
        return False


async def ask(s: Sockets, where: tuple[str, int], source: tuple[str, int] | None = None) -> bool:
    return await is_served(await s.connect(where, LIVE + b"\r\n", source))


@pytest.mark.parametrize("words", [None, b"", CHAT + b"Transfer-Encoding: chunked\r\n\r\n"])
async def test_one_address_does_not_take_all_places(configure: Configure, words: bytes | None) -> None:
    """Of HTTP, or of TCP where nothing is said; those of other addresses find a place."""
    async with http_bench(configure(watched_gateway(), max_connections=20)) as b, sockets() as s:
        listen = parse_tcp(b.listen)
        for _ in range(30):
            await s.connect(b.address if words is not None else listen, words or b"")
        await until(lambda: s.alive() == 16)
        if words is None:
            await RawClient.connect(b, source=OTHER)
            assert await ask(s, b.address)
        else:
            assert not await ask(s, b.address)
            for _ in range(3):
                assert await ask(s, b.address, OTHER)
        assert await ask(s, monitor_of(b))


def test_idle_connections_of_whoever_holds_most_give_way() -> None:
    """A few addresses can take every place, but not keep another address out."""
    taken = Places(20, Proxies(["10.0.0.1"]))
    closed: list[str] = []

    def fill(address: str, idle: bool) -> int:
        number = 0
        while (place := taken.take(address, lambda: closed.append(address))) is not None:
            place.idle = lambda: idle
            number += 1
        return number

    assert fill("192.0.2.1", idle=True) == 16
    assert fill("192.0.2.2", idle=False) == 4
    assert closed == []
    for address in ("192.0.2.3", "10.0.0.1", "192.0.2.4"):
        assert taken.take(address, lambda: None) is not None, address
    assert closed == ["192.0.2.1"] * 3
    assert taken.take("192.0.2.3", lambda: None) is None, "it has a place already"
    for number in range(12):
        assert taken.take(f"198.51.100.{number}", lambda: None) is not None
    assert taken.take("198.51.100.99", lambda: None) is None, "no idle connection is one of several"
    assert taken.quota.used == 20


@pytest.mark.parametrize("protocol", ["tcp", "http"])
async def test_a_full_server_makes_place_for_a_new_address(configure: Configure, protocol: str) -> None:
    async with http_bench(configure(watched_gateway(), max_connections=20)) as b, sockets() as s:
        where = parse_tcp(b.listen) if protocol == "tcp" else b.address
        server = b.process.access.tcp_places if protocol == "tcp" else b.process.access.http_places
        for last in range(2, 6):
            for _ in range(16):
                await s.connect(where, source=(f"127.0.0.{last}", 0))
        await until(lambda: server.quota.free == 0)
        await until(lambda: s.alive() == 20)
        if protocol == "tcp":
            await RawClient.connect(b)
        else:
            assert await ask(s, where)
        await until(lambda: s.alive() <= 20)


async def test_the_monitor_tells_health_and_metrics_and_nothing_else(configure: Configure) -> None:
    config = configure(watched_gateway(http=None))
    async with bench(config) as b:
        url = f"http://127.0.0.1:{monitor_of(b)[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            for path in ("/livez", "/readyz", "/health"):
                assert (await http.get(path)).status_code == 200, path
            assert "omnirelay_stage_up" in (await http.get("/metrics")).text
            for path in ("/", "/v1/models", "/v1/requests/x", "/page/page.js"):
                assert (await http.get(path)).status_code == 404, path
            assert (await http.post("/v1/chat/completions", json={})).status_code == 404
            rebound = await http.get("/metrics", headers={"Host": "evil.example"})
            assert rebound.status_code == 403
            b.process.gateway.close()
            assert (await http.get("/readyz")).status_code == 503
            assert (await http.get("/livez")).status_code == 200


async def test_behind_a_proxy_shares_go_by_the_forwarded_address(configure: Configure) -> None:
    async def send(s: Sockets, b: HttpBench, address: str, what: bytes) -> asyncio.StreamReader:
        return await s.connect(b.address, what + f"X-Forwarded-For: 9.9.9.9, {address}\r\n\r\n".encode())

    config = configure(watched_gateway(trusted_proxies=["127.0.0.1", "10.0.0.0/8"]), max_connections=20)
    async with http_bench(config) as b, sockets() as s:
        slow = CHAT + b"Transfer-Encoding: chunked\r\n"
        readers = [await send(s, b, "192.0.2.1", slow) for _ in range(18)]
        heard = [asyncio.create_task(each.readline()) for each in readers]
        # Those over its share are answered, not hung up on: their connection is the proxy's.
        await until(lambda: sum(each.done() for each in heard) >= 2)
        assert all(b" 429 " in each.result() for each in heard if each.done())
        assert not all(each.done() for each in heard)
        assert await is_served(await send(s, b, "192.0.2.2, 10.1.1.1", LIVE))
        for each in heard:
            each.cancel()


async def test_who_is_no_trusted_proxy_is_not_believed(configure: Configure) -> None:
    async with (
        http_bench(configure(watched_gateway(trusted_proxies=["10.0.0.1"]), max_connections=5)) as b,
        sockets() as s,
    ):
        for number in range(4):
            reader = await s.connect(b.address, LIVE + b"X-Forwarded-For: 192.0.2.%d\r\n\r\n" % number)
            assert await is_served(reader)
        assert not await ask(s, b.address)


def test_whose_an_address_is() -> None:
    proxies = Proxies(["10.0.0.0/8", "::1"])
    assert "10.1.2.3" in proxies
    assert "::1" in proxies
    assert "11.1.2.3" not in proxies
    assert "unknown" not in proxies
    assert proxies.client(["192.0.2.9, 192.0.2.1", "10.0.0.7"]) == "192.0.2.1"
    assert proxies.client(["192.0.2.1:4000"]) == "192.0.2.1"
    assert proxies.client(["[2001:db8::5]:4000"]) == "2001:db8::5"
    for nobody in ([], ["10.0.0.1"], ["192.0.2.1, unknown"], ["_secret"], ["192.0.2.1,"]):
        assert proxies.client(nobody) is None
    assert holder_of("2001:db8:1:2:3::4") == holder_of("2001:db8:1:2:ffff::1") != holder_of("2001:db8:1:3::4")
    assert holder_of("::ffff:192.0.2.1") == holder_of("192.0.2.1")


def test_a_key_takes_its_connection_out_of_the_share_of_its_address() -> None:
    taken = Places(5, Proxies([]))
    held = [taken.take("192.0.2.1", lambda: None) for _ in range(4)]
    assert None not in held
    assert taken.take("192.0.2.1", lambda: None) is None
    for each in held[:2]:
        assert each is not None
        assert each.move("alice")
    more = taken.take("192.0.2.1", lambda: None)
    assert more is not None
    # Of which its holder has a share, too, whatever it moves: one key took all places by WebSockets.
    assert [each.move("alice") for each in (more, held[2]) if each is not None] == [True, True]
    for _ in range(2):
        with pytest.raises(BusyError):
            move({"state": {protocol.PLACE: held[3]}}, "alice")
    for each in (*held, more, more):
        assert each is not None
        each.leave()
        assert each.move("late")
    assert taken.quota.used == 0


def test_proxies_are_addresses_or_networks(configure: Configure) -> None:
    with pytest.raises(ValueError, match=r"'proxy' is not an address, nor a network"):
        configure({"trusted_proxies": ["proxy"]})


async def write(writer: asyncio.StreamWriter, size: int) -> None:
    for _ in range(size // MAX_PIECE_BYTES):
        writer.write(bytes(MAX_PIECE_BYTES))
        await writer.drain()


HEADS = {"one line": b"X: " + b"y" * 40_000 + b"\r\n", "many lines": b"X: y\r\n" * 8000}


@pytest.mark.parametrize("pieces", [1, 2, 50])
@pytest.mark.parametrize("lines", HEADS)
async def test_a_head_has_one_limit_however_it_is_cut(web: HttpBench, lines: str, pieces: int) -> None:
    async with sockets() as s:
        for size, served in ((len(HEADS[lines]), False), (30_000, True)):
            head = LIVE + HEADS[lines][: size // 6 * 6]
            head += b"\r\n\r\n" if served and lines == "one line" else b"\r\n"
            reader = await s.connect(web.address)
            writer = s.open[-1][1]
            step = -(-len(head) // pieces)
            for start in range(0, len(head), step):
                writer.write(head[start : start + step])
                await writer.drain()
                await asyncio.sleep(0.001)
            answer = await reader.readline()
            assert answer.startswith(b"HTTP/1.1 200" if served else b"HTTP/1.1 400"), (size, answer)


async def test_a_second_head_has_the_same_limit(web: HttpBench) -> None:
    """It may have come together with the first one."""

    async with sockets() as s:
        reader = await s.connect(web.address, LIVE + b"\r\n" + LIVE + HEADS["one line"] + b"\r\n")
        assert re.findall(rb"HTTP/1.1 (\d+)", await reader.read()) == [b"200", b"400"]


@pytest.mark.parametrize("keep", [b"Connection: close\r\n", b""])
@pytest.mark.parametrize("reply", [b"413", b"404"])
async def test_who_sends_a_long_body_hears_an_answer(configure: Configure, keep: bytes, reply: bytes) -> None:
    """Also if it reads nothing before it has sent all."""

    limits = {"media": {"max_item_bytes": 10**6, "max_request_bytes": 10**6}, "request_bytes": 10**7}
    async with http_bench(configure(http_gateway(), **limits)) as b, sockets() as s:
        path = CHAT if reply == b"413" else CHAT.replace(b"/v1/chat/completions", b"/nowhere")
        size = 3 * 10**7
        head = path + keep + b"Content-Length: %d\r\n\r\n" % size
        reader = await s.connect(b.address, head)
        writer = s.open[-1][1]
        await write(writer, size)
        assert reply in await reader.readline()


async def test_what_is_drained_is_bounded(web: HttpBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr(protocol, "DRAIN_BYTES", 10**6)

    async with sockets() as s:
        for keep in (b"Connection: close\r\n", b""):
            head = CHAT.replace(b"/v1/chat/completions", b"/nowhere") + keep
            await s.connect(web.address, head + b"Content-Length: %d\r\n\r\n" % 10**9)
            writer = s.open[-1][1]
            with pytest.raises(ConnectionError):
                await write(writer, 10**9)


def partial_message(size: int, sent: int) -> bytes:
    """The beginning of a text message of a WebSocket, as a client masks it."""
    return b"\x81\xff" + size.to_bytes(8, "big") + bytes(4) + b" " * sent


async def session(b: HttpBench) -> ClientConnection:
    socket = await connect(f"ws://127.0.0.1:{b.address[1]}/v1/realtime", ping_interval=None)
    await socket.recv()
    return socket


async def test_a_message_of_a_websocket_is_an_upload_like_others(configure: Configure) -> None:
    """It takes memory as it comes, and makes way for one that goes on."""
    mib = 2**20

    limits = {"media": {"max_item_bytes": mib, "max_request_bytes": mib}, "request_bytes": 3 * mib}
    async with http_bench(configure(http_gateway(), **limits, held_bytes=2 * mib)) as b:
        used = b.process._server._uploads
        socket = await session(b)
        socket.transport.write(partial_message(10 * mib, mib))
        await until(lambda: used.used > mib)
        other = await session(b)
        await until(lambda: all(each.speed() < 2**17 for each in used._uploads))
        other.transport.write(partial_message(2 * mib - 1000, 2 * mib - 1000))
        assert "error" in await other.recv()
        async with asyncio.timeout(60):
            await socket.wait_closed()
        await until(lambda: used.used == 0)
        await other.close()
        await until(lambda: b.process.access.http_places.quota.used == 0)


async def test_a_websocket_message_that_stops_coming_ends_it(web: HttpBench, monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.fairness.uploads.IDLE_S", 0.2)

    socket = await session(web)
    socket.transport.write(partial_message(10_000_000, 1000))
    async with asyncio.timeout(60):
        await socket.wait_closed()
    await until(lambda: not web.process._server._uploads._uploads)


async def test_who_reads_nothing_keeps_no_socket_open(tcp: Bench) -> None:
    """Not after the end of its requests, when the last messages for it cannot be sent."""
    loop = asyncio.get_running_loop()
    with socket.create_connection(parse_tcp(tcp.listen)) as deaf:
        deaf.setblocking(False)
        await loop.sock_sendall(deaf, pack(Hello(PROTOCOL_VERSION)))
        server: Any = tcp.process._server
        await until(lambda: len(server._connections) == 1)
        (connection,) = server._connections.values()
        transport = connection._writer.transport
        await until(lambda: connection._max_frame_bytes)
        answered: list[int] = []
        status = connection._status

        def counted() -> StatusReport:
            answered.append(1)
            return status()

        def all_answered() -> bool:
            return len(answered) == most

        connection._status, most = counted, 0
        while not transport.get_write_buffer_size():
            # Few at once: above the high-water mark the gateway would wait, and not read the end.
            most = len(answered) + 20
            for number in range(len(answered), most):
                await loop.sock_sendall(deaf, pack(StatusQuery(number)))
            await until(all_answered)
        deaf.shutdown(socket.SHUT_WR)
        await until(lambda: not server._connections and not tcp.process.access.tcp_places.taken)
        await until(lambda: transport.get_extra_info("socket").fileno() == -1)


async def test_a_cancel_does_not_swallow_an_error_that_is_being_sent(tcp: Bench, raw: RawClient) -> None:
    (connection,) = tcp.process._server._connections.values()
    async with connection._sending:
        raw.say(submit(1, GenerateRequest(messages=[])))
        # It is refused, and waits for its turn to be sent.
        await until(lambda: connection._tasks and not connection._cancels)
        raw.say(Cancel(1))
        raw.say(Ping())
        await until(lambda: connection._sending._waiters and len(connection._sending._waiters) == 2)
    (reply,) = [each for each in (await raw.hear(), await raw.hear()) if isinstance(each, Reply)]
    assert isinstance(reply.event, ErrorEvent)

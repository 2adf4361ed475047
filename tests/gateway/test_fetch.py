"""What is fetched over https: from allowed hosts at public addresses, whole and in time, or not at all."""

import asyncio
import gzip
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.input.fetch import AT_ONCE, Fetcher, resolve
from gateway.input.urls import parse_https
from omnirelay.errors import BusyError, ConfigError, MediaTooLargeError, MediaUnreachableError
from shared.config import MediaConfig
from tests.gateway.bench import Patch
from tests.gateway.https_server import HOST, Authority, HttpsServer, https_server

FILE = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
async def server(authority: Authority) -> AsyncIterator[HttpsServer]:
    async with https_server(authority) as ours:
        yield ours


async def here(host: str, port: int) -> Sequence[str]:
    del host, port
    return ["127.0.0.1"]


def fetcher(
    server: HttpsServer,
    resolve: Callable[..., Any] = here,
    allowed: Callable[[str], bool] = lambda _: True,
    tls: ssl.SSLContext | None = None,
    **config: Any,
) -> Fetcher:
    media = MediaConfig(url_hosts=[f"{HOST}:{server.port}"], **config)
    return Fetcher(media, resolve, allowed, tls or server.authority.trusting)


async def fetch(fetcher: Fetcher, server: HttpsServer, path: str, host: str = HOST) -> bytes:
    url = parse_https("image 1", f"https://{host}:{server.port}{path}")
    return bytes(await fetcher.fetch("image 1", url, lambda _: None))


async def test_a_file_comes_whole_and_is_counted_as_it_comes(server: HttpsServer) -> None:
    server.give("/a%2Fb?x=%20", FILE)
    url = parse_https("image 1", f"https://{HOST.upper()}:{server.port}/a%2Fb?x=%20#part")
    counted: list[int] = []
    assert await fetcher(server).fetch("image 1", url, counted.append) == FILE
    assert sum(counted) == len(FILE)
    assert len(counted) > 1
    head = server.asked[0].lower()
    assert head.startswith("get /a%2fb?x=%20 http/1.1\r\n")
    assert f"host: {HOST}:{server.port}\r\n" in head
    assert "accept-encoding: identity\r\n" in head
    for unwanted in ("cookie", "authorization", "referer", "proxy"):
        assert unwanted not in head


async def test_the_environment_leads_nowhere(server: HttpsServer, monkeypatch: Patch, tmp_path: Path) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / "netrc").write_text(f"machine {HOST} login someone password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    server.give("/", FILE)
    assert await fetch(fetcher(server), server, "/") == FILE
    assert "authorization" not in server.asked[0].lower()


async def test_redirects_are_not_followed(server: HttpsServer) -> None:
    server.give("/there", FILE)
    for status in (301, 302, 303, 307, 308):
        server.give("/", b"secret", f"{status} Moved", "Location: /there\r\nSet-Cookie: a=b\r\n")
        with pytest.raises(MediaUnreachableError, match=f"answered {status}, and redirects") as raised:
            await fetch(fetcher(server), server, "/")
        assert "secret" not in str(raised.value)
    assert len(server.asked) == 5


async def test_answers_that_are_no_file(server: HttpsServer) -> None:
    server.give("/empty", b"", "204 No Content")
    server.give("/packed", gzip.compress(bytes(10**6)), headers="Content-Encoding: gzip\r\n")
    server.give("/error", b"secret", "500 secret")

    async def nonsense(writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-secret\r\n\r\n")

    async def short(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsecret")

    async def endless_head(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nX: " + b"secret" * 10_000)
        await writer.drain()

    server.answers |= {"/nonsense": nonsense, "/short": short, "/head": endless_head}
    told = {
        "/missing": "answered 404",
        "/empty": "answered 204",
        "/error": "answered 500",
        "/packed": "sent it compressed",
        "/nonsense": "not an HTTP answer",
        "/short": "breaks off",
        "/head": "not an HTTP answer",
    }
    for path, words in told.items():
        with pytest.raises(MediaUnreachableError, match=f"^image 1: .*{words}") as raised:
            await fetch(fetcher(server), server, path)
        assert "secret" not in str(raised.value)


async def test_size_is_bounded_by_word_and_by_deed(server: HttpsServer) -> None:
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(2**16) + b"\r\n")
            sent += 2**16
            await writer.drain()

    server.answers["/endless"] = endless
    server.give("/large", FILE)
    limited = fetcher(server, max_item_bytes=len(FILE) - 1)
    for path in ("/large", "/endless"):
        with pytest.raises(MediaTooLargeError, match=f"image 1: .* at most {len(FILE) - 1}"):
            await fetch(limited, server, path)
    assert sent < 2**24
    assert await fetch(fetcher(server, max_item_bytes=len(FILE)), server, "/large") == FILE


async def test_room_is_asked_for_before_bytes_are_kept(server: HttpsServer) -> None:
    server.give("/", FILE)

    def full(size: int) -> None:
        raise BusyError(f"no room for {size}", 1)

    with pytest.raises(BusyError):
        await fetcher(server).fetch("image 1", parse_https("image 1", f"https://{HOST}:{server.port}/"), full)


@pytest.mark.parametrize("where", ["head", "body", "name"])
async def test_what_takes_too_long_is_given_up(server: HttpsServer, where: str) -> None:
    never = asyncio.Event()

    async def slow(writer: asyncio.StreamWriter) -> None:
        if where == "body":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx")
        await never.wait()

    async def slow_name(host: str, port: int) -> Sequence[str]:
        await never.wait()
        return await here(host, port)

    server.answers["/"] = slow
    lookup = slow_name if where == "name" else here
    began = time.monotonic()
    with pytest.raises(MediaUnreachableError, match=r"did not deliver it within 0\.2 s"):
        await fetch(fetcher(server, lookup, url_timeout_s=0.2), server, "/")
    assert time.monotonic() - began < 30
    never.set()


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["::1"], []])
async def test_only_public_addresses_are_connected_to(
    authority: Authority, server: HttpsServer, addresses: list[str]
) -> None:
    async def there(host: str, port: int) -> Sequence[str]:
        return addresses

    media = MediaConfig(url_hosts=[f"{HOST}:{server.port}"])
    guarded = Fetcher(media, there, tls=authority.trusting)
    with pytest.raises(MediaUnreachableError, match="an address that is not public") as raised:
        await fetch(guarded, server, "/")
    assert not any(address in str(raised.value) for address in addresses)
    assert server.asked == []


async def test_a_name_that_changes_its_mind_is_asked_once(server: HttpsServer) -> None:
    """What was checked is connected to, and not what the name stands for by then."""
    answers = [["127.0.0.1"], ["169.254.169.254"], ["169.254.169.254"]]
    asked: list[str] = []

    async def rebinding(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return answers.pop(0)

    def checked(address: str) -> bool:
        return address == "127.0.0.1"

    server.give("/", FILE)
    guarded = fetcher(server, rebinding, checked)
    assert await fetch(guarded, server, "/") == FILE
    assert asked == [HOST]
    with pytest.raises(MediaUnreachableError, match="not public"):
        await fetch(guarded, server, "/")
    assert len(server.asked) == 1


async def test_certificates_must_be_known_and_of_that_name(authority: Authority, tmp_path: Path) -> None:
    async with https_server(authority, host="other.test") as other, https_server(authority) as server:
        other.give("/", FILE)
        server.give("/", FILE)
        with pytest.raises(MediaUnreachableError, match="certificate is not valid"):
            await fetch(fetcher(other), other, "/")
        unknown = ssl.create_default_context()
        with pytest.raises(MediaUnreachableError, match="not known to this gateway"):
            await fetch(fetcher(server, tls=unknown), server, "/")
        assert other.asked == server.asked == []


async def test_hosts_are_allowed_by_exact_name_and_port(server: HttpsServer) -> None:
    server.give("/", FILE)
    ours = fetcher(server)
    for place in (
        f"www.{HOST}:{server.port}",
        f"{HOST}.:{server.port}",
        f"{HOST}.evil.test:{server.port}",
        HOST,
        f"{HOST}:{server.port + 1}",
        f"127.0.0.1:{server.port}",
        f"127.1:{server.port}",
        f"2130706433:{server.port}",
        f"0x7f000001:{server.port}",
    ):
        with pytest.raises(MediaUnreachableError, match=r"does not fetch from .*media\.url_hosts"):
            await ours.fetch("image 1", parse_https("image 1", f"https://{place}/"), lambda _: None)
    assert server.asked == []


async def test_literal_addresses_are_checked_like_names(tmp_path: Path) -> None:
    authority = Authority(tmp_path)

    async with https_server(authority, host="127.0.0.1") as server:
        server.give("/", FILE)
        media = MediaConfig(url_hosts=[f"127.0.0.1:{server.port}"])
        with pytest.raises(MediaUnreachableError, match="not public"):
            await fetch(Fetcher(media, tls=authority.trusting), server, "/", "127.0.0.1")
        allowing = Fetcher(media, allowed=lambda _: True, tls=authority.trusting)
        assert await fetch(allowing, server, "/", "127.0.0.1") == FILE


async def test_only_a_few_are_fetched_at_once(server: HttpsServer) -> None:
    going, most = 0, 0
    enough, go_on = asyncio.Event(), asyncio.Event()

    async def wait(writer: asyncio.StreamWriter) -> None:
        nonlocal going, most
        going += 1
        most = max(most, going)
        if going == AT_ONCE:
            enough.set()
        await go_on.wait()
        going -= 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")

    server.answers["/"] = wait
    ours = fetcher(server)
    tasks = [asyncio.create_task(fetch(ours, server, "/")) for _ in range(3 * AT_ONCE)]
    await enough.wait()
    go_on.set()
    assert await asyncio.gather(*tasks) == [b"x"] * len(tasks)
    assert most == AT_ONCE


async def test_hosts_without_address_and_without_server() -> None:
    async def nowhere(host: str, port: int) -> Sequence[str]:
        raise OSError("no such host")

    async def odd(host: str, port: int) -> Sequence[str]:
        return await resolve("a" * 64 + ".test", port)

    media = MediaConfig(url_hosts=["media.test:9"])
    url = parse_https("image 1", "https://media.test:9/")
    for lookup in (nowhere, odd):
        with pytest.raises(MediaUnreachableError, match="has no address"):
            await Fetcher(media, lookup).fetch("image 1", url, lambda _: None)
    with pytest.raises(MediaUnreachableError, match="cannot be connected to"):
        await Fetcher(media, here, lambda _: True).fetch("image 1", url, lambda _: None)
    assert await resolve("127.0.0.1", 443) == ["127.0.0.1"]


@pytest.mark.parametrize("host", ["https://example.com", "*.example.com", "example.com:x", ""])
def test_hosts_that_are_none_are_told_when_the_gateway_starts(host: str) -> None:
    with pytest.raises(ConfigError, match=r"media\.url_hosts"):
        Fetcher(MediaConfig(url_hosts=[host]))

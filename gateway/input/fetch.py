"""Fetches media over https from configured hosts.

The host is resolved once, every address is checked, and the connection goes to a checked address, so DNS
rebinding has no effect.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import aiohttp
import aiohttp.abc
from yarl import URL

from gateway.fairness.thread import FairSemaphore
from gateway.input.urls import HttpsUrl, parse_host
from omnirelay.errors import ConfigError, MediaTooLargeError, MediaUnreachableError
from shared.config import MediaConfig
from shared.log import limited

AT_ONCE: Final = 4
"""Concurrent fetches, over all requests."""
CHUNK_BYTES: Final = 2**16
_HEADERS: Final = {"User-Agent": "omnirelay", "Accept": "*/*", "Accept-Encoding": "identity"}
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL: Final = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("3fff::/20"))
"""Reserved by IANA but unknown to Python 3.11."""

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Gives the addresses of a host; raises OSError if it has none."""
log = logging.getLogger(__name__)


def is_public(address: str) -> bool:
    """The address is public, also if it is IPv6 and embeds an IPv4 address."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    if any(ip in network for network in _SPECIAL):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


async def resolve(host: str, port: int) -> Sequence[str]:
    """Resolve a host by the system's resolver."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Fetcher:
    """Fetches media files, with the system's trust store by default; ConfigError if a host is malformed."""

    def __init__(
        self,
        config: MediaConfig,
        resolve: Resolve = resolve,
        allowed: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._timeout_s = config.url_timeout_s
        self._max_bytes = config.max_item_bytes
        self._resolve = resolve
        self._allowed = allowed
        self._tls = tls or ssl.create_default_context()
        self._places = FairSemaphore(AT_ONCE)
        self._hosts: set[tuple[str, int]] = set()
        for text in config.url_hosts:
            if (place := parse_host(text)) is None:
                raise ConfigError(f"media.url_hosts: {text!r} is neither HOST nor HOST:PORT")
            self._hosts.add(place)

    def check(self, name: str, url: HttpsUrl) -> None:
        """Raise MediaUnreachableError if the host is not configured."""
        if (url.host, url.port) not in self._hosts:
            raise MediaUnreachableError(
                f"{name}: this gateway does not fetch from {url.host}:{url.port} (media.url_hosts)"
            )

    async def fetch(
        self, name: str, url: HttpsUrl, grow: Callable[[int], None], client: str = ""
    ) -> bytearray:
        """Fetch the file of the named item; clients take turns.

        Args:
            grow: Called with a number of bytes before they are kept; may raise.

        Raises:
            MediaError: It cannot be fetched, or is too large.
        """
        self.check(name, url)
        async with self._places.take(client):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._get(name, url, await self._addresses(name, url), grow)
            except TimeoutError as error:
                raise MediaUnreachableError(
                    f"{name}: {url.host} did not deliver it within {self._timeout_s:g} s"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                # The error may quote the server's response.
                limited(log).info("%s could not be fetched from %s: %s", name, url.host, type(error).__name__)
                raise MediaUnreachableError(
                    f"{name}: cannot be fetched from {url.host}: {_reason(error)}"
                ) from error

    async def _addresses(self, name: str, url: HttpsUrl) -> Sequence[str]:
        """The addresses of the host, all of them allowed."""
        try:
            addresses = await self._resolve(url.host, url.port)
        except (OSError, UnicodeError) as error:
            raise MediaUnreachableError(f"{name}: {url.host} has no address") from error
        if not addresses or not all(map(self._allowed, addresses)):
            # Naming it would reveal the internal network.
            raise MediaUnreachableError(f"{name}: {url.host} leads to an address that is not public")
        return addresses

    async def _get(
        self, name: str, url: HttpsUrl, addresses: Sequence[str], grow: Callable[[int], None]
    ) -> bytearray:
        connector = aiohttp.TCPConnector(resolver=_Pinned(addresses), ssl=self._tls, force_close=True)
        session = aiohttp.ClientSession(
            connector=connector,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
        )
        place = f"https://{url.host}:{url.port}{url.target}"
        async with session, session.get(URL(place, encoded=True), allow_redirects=False) as response:
            if response.status != 200:
                redirect = ", and redirects are not followed" if 300 <= response.status < 400 else ""
                raise MediaUnreachableError(f"{name}: {url.host} answered {response.status}{redirect}")
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise MediaUnreachableError(f"{name}: {url.host} sent it compressed, which was not asked for")
            self._check_size(name, response.content_length or 0)
            body = bytearray()
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                self._check_size(name, len(body) + len(chunk))
                grow(len(chunk))
                body += chunk
            return body

    def _check_size(self, name: str, size: int) -> None:
        if size > self._max_bytes:
            raise MediaTooLargeError(
                f"{name}: at least {size} bytes, at most {self._max_bytes} are allowed (media.max_item_bytes)"
            )


class _Pinned(aiohttp.abc.AbstractResolver):
    """Resolves every host to the checked addresses."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[aiohttp.abc.ResolveResult]:
        del family
        return [
            {
                "hostname": host,
                "host": address,
                "port": port,
                "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
                "proto": socket.IPPROTO_TCP,
                "flags": socket.AI_NUMERICHOST,
            }
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Nothing to close."""


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "its certificate is not valid for this name, or not known to this gateway"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "it cannot be connected to"
    return "what it sends is not an HTTP answer, or breaks off"

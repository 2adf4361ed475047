"""Access of clients, over TCP and over HTTP: keys, TLS, and what each connection may hold."""

import ipaddress
import logging
import ssl
import time
from pathlib import Path
from typing import Final, TypedDict

from gateway.access import places, tls
from gateway.access.account import ClientAccount, Unread
from gateway.access.api_keys import ApiKeys
from gateway.access.certificate import ServerTls
from gateway.access.clients import Principal
from gateway.access.places import Places, Proxies, holder_of
from omnirelay.errors import ConfigError
from omnirelay.protocol import MAX_PIECE_BYTES, PROTOCOL_VERSION, Welcome, parse_tcp
from shared.config import Config, GatewayConfig

SHUTDOWN_S: Final = 5.0
"""How long a client may take to agree on the end of a TLS connection."""
log = logging.getLogger(__name__)


class TlsOptions(TypedDict, total=False):
    """Arguments of the event loop's ``create_server``."""

    ssl: ssl.SSLContext
    ssl_handshake_timeout: float
    ssl_shutdown_timeout: float


class Access:
    """Says who comes in.

    Args:
        config: The whole stack's.

    Raises:
        ConfigError: The file of keys, the certificate or its key cannot be used.
    """

    def __init__(self, config: Config) -> None:
        self._gateway = config.gateway
        self._media = config.media
        path = config.gateway.api_keys
        self.keys: Final = ApiKeys(Path(path) if path is not None else None)
        self.tls: Final = (
            ServerTls(config.gateway.tls) if config.gateway.tls.certificate is not None else None
        )
        self.proxies: Final = Proxies(config.gateway.trusted_proxies)
        self.tcp_places: Final = Places(places.MAX_CONNECTIONS, self.proxies)
        self.http_places: Final = Places(places.MAX_CONNECTIONS, self.proxies)
        self._unread = Unread(config.gateway.limits.backlog_bytes)

    @property
    def server_options(self) -> TlsOptions:
        """What a server is made with, so that it speaks TLS where that is wanted."""
        if self.tls is None:
            return {}
        return TlsOptions(
            ssl=self.tls.context, ssl_handshake_timeout=tls.HANDSHAKE_S, ssl_shutdown_timeout=SHUTDOWN_S
        )

    @property
    def open_requests(self) -> int:
        """Requests that are prepared, wait, are answered, or have not been read to their end."""
        return self._unread.requests

    def client(self, key: str | None, name: str) -> Principal:
        """Say who comes.

        Args:
            key: What came as a key.
            name: What the client goes by where no keys are needed.

        Raises:
            UnauthenticatedError: A key is needed, and this is none that is known.
        """
        return self.keys.client(key) if self.keys.needed else Principal(name)

    def share(self, client: Principal, address: str) -> str:
        """What the share of a connection goes by: its key, or else the address that it comes from."""
        return client.name if self.keys.needed and client.known else holder_of(address)

    def account(self, name: str, client: Principal) -> ClientAccount:
        """Open an account for a connection of a client.

        Args:
            name: What the connection goes by in the log.
            client: Whose it is.
        """
        limits = self._gateway.limits
        if client.name != name and self.keys.needed:
            name = f"{name} ({client.name})"
        return ClientAccount(
            name, limits.max_queued_per_client, limits.client_backlog_bytes, client, self._unread
        )

    def welcome(self, client: Principal) -> Welcome:
        """Tell a client what is taken of it."""
        most = self._gateway.limits.request_bytes
        if client.limits.request_bytes is not None:
            most = min(most, client.limits.request_bytes)
        media = self._media
        return Welcome(PROTOCOL_VERSION, most, media.max_item_bytes, media.max_request_bytes, MAX_PIECE_BYTES)

    def reload(self) -> None:
        """Read keys and certificate again, all or nothing: if a file cannot be used, the log says so."""
        if not self.keys.needed and self.tls is None:
            log.info("there is nothing to read again: no API keys and no certificate are configured")
            return
        try:
            keys = self.keys.read()
            certificate = self.tls.read() if self.tls is not None else None
        except ConfigError as error:
            log.error("nothing was changed: %s", error)
            return
        self.keys.take(keys)
        told = [f"{len(keys)} API keys"] if self.keys.needed else []
        if self.tls is not None and certificate is not None:
            self.tls.show(certificate)
            told.append(f"the certificate, valid {certificate.left(time.time())}")
        log.info("read again: %s", "; ".join(told))
        self._warn_of_certificate()

    def warn(self) -> None:
        """Say in the log what anybody could use or read."""
        for what in open_doors(self._gateway):
            log.warning("%s", what)
        self._warn_of_certificate()

    def _warn_of_certificate(self) -> None:
        if self.tls is None:
            return
        shown = self.tls.certificate
        for what in filter(None, (shown.why_not_now(time.time()), shown.why_not_chained())):
            log.warning("%s", what)


def open_doors(gateway: GatewayConfig) -> list[str]:
    """Say what other machines may use without a key, or read on the way."""
    addresses = {"gateway.listen": gateway.listen, "gateway.http": gateway.http}
    reached = [key for key, address in addresses.items() if address and not _is_loopback(address)]
    if not reached:
        return []
    where = " and ".join(reached)
    told = []
    if gateway.api_keys is None:
        told.append(f"who can reach {where} can use this gateway: it asks for no key (gateway.api_keys)")
    if gateway.tls.certificate is None:
        told.append(f"what goes over {where} can be read on the way: there is no TLS (gateway.tls)")
    return told


def _is_loopback(address: str) -> bool:
    host = parse_tcp(address)[0]
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

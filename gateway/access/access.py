"""What both servers ask about clients: keys, TLS, shares, connection limits."""

import logging
import ssl
import time
from pathlib import Path
from typing import Final, TypedDict

from gateway.access import tls
from gateway.access.account import ClientAccount, Principal, Unread
from gateway.access.api_keys import ApiKeys, EphemeralKeys
from gateway.access.certificate import ServerTls
from gateway.access.places import Places, Proxies, holder_of
from omnirelay.errors import ConfigError
from omnirelay.protocol import MAX_PIECE_BYTES, PROTOCOL_VERSION, Welcome
from shared.config import Config, GatewayConfig
from shared.config.values import is_local

SHUTDOWN_S: Final = 5.0
"""Time limit of the TLS shutdown."""
log = logging.getLogger(__name__)


class TlsOptions(TypedDict, total=False):
    """Arguments of the event loop's ``create_server``."""

    ssl: ssl.SSLContext
    ssl_handshake_timeout: float
    ssl_shutdown_timeout: float


class Access:
    """Authenticates clients and opens their accounts; raises ConfigError as keys and certificate do."""

    def __init__(self, config: Config) -> None:
        gateway, limits = config.gateway, config.gateway.limits
        self._gateway = gateway
        self._media = config.media
        self.keys: Final = ApiKeys(Path(gateway.api_keys) if gateway.api_keys is not None else None)
        self.ephemeral: Final = EphemeralKeys()
        self.tls: Final = ServerTls(gateway.tls) if gateway.tls.certificate is not None else None
        self.proxies: Final = Proxies(gateway.trusted_proxies)
        self.tcp_places: Final = Places(limits.max_connections, self.proxies)
        self.http_places: Final = Places(limits.max_connections, self.proxies)
        self._unread = Unread(limits.backlog_bytes)

    @property
    def server_options(self) -> TlsOptions:
        """TLS arguments for a server; empty without TLS."""
        if self.tls is None:
            return {}
        return TlsOptions(
            ssl=self.tls.context, ssl_handshake_timeout=tls.HANDSHAKE_S, ssl_shutdown_timeout=SHUTDOWN_S
        )

    @property
    def open_requests(self) -> int:
        """Requests that have not ended, or whose answers have not been read."""
        return self._unread.requests

    def client(self, key: str | None, name: str) -> Principal:
        """The client with a key, or UnauthenticatedError; where no keys are needed, one with this name."""
        return self.keys.client(key) if self.keys.needed else Principal(name)

    def share(self, client: Principal, address: str) -> str:
        """The quota that a connection uses: its key's, or its address's."""
        return client.name if self.keys.needed and client.known else holder_of(address)

    def account(self, name: str, client: Principal) -> ClientAccount:
        """Open an account for a connection; ``name`` is its name in the log."""
        limits = self._gateway.limits
        if client.name != name and self.keys.needed:
            name = f"{name} ({client.name})"
        return ClientAccount(
            name, limits.max_queued_per_client, limits.client_backlog_bytes, client, self._unread
        )

    def welcome(self, client: Principal) -> Welcome:
        """The limits that a client is told."""
        most = client.most_bytes(self._gateway.limits.request_bytes)
        item, together = self._media.max_item_bytes, self._media.max_request_bytes
        return Welcome(PROTOCOL_VERSION, most, item, together, MAX_PIECE_BYTES, resumes=True)

    def reload(self) -> None:
        """Reload keys and certificate, both or neither; the log tells why if not."""
        if not self.keys.needed and self.tls is None:
            log.info("nothing to reload: neither API keys nor a certificate are configured")
            return
        try:
            keys = self.keys.read()
            certificate = self.tls.read() if self.tls is not None else None
        except ConfigError as error:
            log.error("reload failed, nothing was changed: %s", error)
            return
        self.keys.take(keys)
        told = [f"{len(keys)} API keys"] if self.keys.needed else []
        if self.tls is not None and certificate is not None:
            self.tls.certificate = certificate
            told.append(f"the certificate, valid {certificate.left(time.time())}")
        log.info("reloaded: %s", "; ".join(told))
        self._warn_of_certificate()

    def warn(self) -> None:
        """Log warnings about missing keys, missing TLS, and the certificate."""
        for what in open_doors(self._gateway):
            log.warning("%s", what)
        self._warn_of_certificate()

    def _warn_of_certificate(self) -> None:
        if self.tls is not None:
            shown = self.tls.certificate
            for what in filter(None, (shown.why_not_now(time.time()), shown.why_not_chained())):
                log.warning("%s", what)


def open_doors(gateway: GatewayConfig) -> list[str]:
    """Warnings about addresses that other machines reach without keys or TLS."""
    addresses = {"gateway.listen": gateway.listen, "gateway.http": gateway.http}
    reached = [key for key, address in addresses.items() if address and not is_local(address)]
    if not reached:
        return []
    where = " and ".join(reached)
    told = []
    if gateway.api_keys is None:
        told.append(f"{where}: other machines can use this gateway with no key (set gateway.api_keys)")
    if gateway.tls.certificate is None:
        told.append(f"{where}: traffic can be read in transit, as there is no TLS (set gateway.tls)")
    return told

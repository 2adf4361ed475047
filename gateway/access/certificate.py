"""The gateway's TLS certificate: read, checked, and replaced without a restart."""

import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.access.tls import pem_certificates, trusting_all, trusting_only
from omnirelay.errors import ConfigError
from shared.config import TlsConfig
from shared.metrics import gauge
from shared.transport.keys import is_open_to_others

SOON_S: Final = 14 * 86_400
"""A certificate that expires within that time should be renewed."""
_FLIGHTS: Final = 10
"""More than any handshake has."""


@dataclass(frozen=True)
class Certificate:
    """A certificate with its private key, and a context that presents it.

    Attributes:
        begins: Start of its validity, Unix time.
        expires: End of its validity, Unix time.
        chained: The further certificates of the file form a chain from it.
    """

    context: ssl.SSLContext
    path: str
    begins: float
    expires: float
    chained: bool

    def why_not_now(self, now: float) -> str | None:
        """Why clients reject it at that time, if they do."""
        if now < self.begins:
            return f"{self.path} is not valid before {_date(self.begins)}: clients reject it"
        if now >= self.expires:
            return f"{self.path} expired at {_date(self.expires)}: clients reject it"
        return None

    def left(self, now: float) -> str:
        """Its remaining validity, for the log."""
        days = (self.expires - now) / 86_400
        return f"until {_date(self.expires)}, {abs(days):.0f} days{'' if days >= 0 else ' ago'}"

    def why_not_chained(self) -> str | None:
        """What is wrong with its chain, as far as the file shows."""
        if self.chained:
            return None
        return (
            f"the certificates in {self.path} do not lead from the first, the gateway's own, to the last: "
            "clients that know only the authority above them may refuse it"
        )


class ServerTls(Collector):
    """TLS 1.2 or later with a replaceable certificate; raises as :func:`read_certificate` does."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self.certificate = read_certificate(tls)
        # Loading files into an OpenSSL context is not atomic: so this one has no certificate, and hands each
        # handshake to the current one's context.
        self.context: Final = _server_context()
        self.context.sni_callback = self._choose

    def read(self) -> Certificate:
        """Read the files again, to replace ``certificate``; ConfigError also if that would end validity."""
        renewed, now = read_certificate(self._tls), time.time()
        worse = renewed.why_not_now(now)
        if worse is not None and self.certificate.why_not_now(now) is None:
            raise ConfigError(f"{worse}, and the current one is still valid")
        return renewed

    def collect(self) -> Iterator[Metric]:
        """The expiry metric."""
        yield gauge(
            "omnirelay_tls_certificate_expiry_timestamp_seconds",
            "Expiry of the TLS certificate, as Unix time.",
            [({}, self.certificate.expires)],
        )

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self.certificate.context


def read_certificate(tls: TlsConfig) -> Certificate:
    """Read a certificate and its key, and test a handshake; ConfigError if it fails, or the key is open."""
    if tls.certificate is None or tls.key is None:
        raise ConfigError("gateway.tls names no certificate and key")
    context = _server_context()
    try:
        if is_open_to_others(Path(tls.key).stat()):
            raise ConfigError(f"{tls.key} (gateway.tls.key) is accessible to others: chmod 600 it")
        # Without a password OpenSSL would ask for one at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password="")
        behind = pem_certificates(Path(tls.certificate))[1:]
    except ssl.SSLError as error:
        raise ConfigError(
            f"{tls.certificate} (gateway.tls.certificate) and {tls.key} (gateway.tls.key) are no certificate "
            f"and its key in PEM, without a password: {error.reason or error}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {tls.certificate} (gateway.tls.certificate) or {tls.key} (gateway.tls.key): "
            f"{error.strerror}"
        ) from error
    try:
        # As loaded: the file may have changed since.
        shown = _meet(context, trusting_all()).getpeercert(binary_form=True)
        fields = _meet(context, trusting_only(shown or b"")).getpeercert() or {}
    except ssl.SSLError as error:
        why = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        problem = f"clients cannot use {tls.certificate} (gateway.tls.certificate): {why or error}"
        raise ConfigError(problem) from None
    begins, expires = (ssl.cert_time_to_seconds(str(fields[key])) for key in ("notBefore", "notAfter"))
    chained = not behind or _leads_to(context, behind[-1])
    return Certificate(context, tls.certificate, begins, expires, chained)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _leads_to(context: ssl.SSLContext, last: bytes) -> bool:
    """A client that trusts only this certificate of the file accepts the first one."""
    try:
        _meet(context, trusting_only(last))
    except ssl.SSLError:
        return False
    return True


def _meet(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Perform a handshake in memory, and return the client's side; SSLError if it fails."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(_FLIGHTS):
        agreed = True
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                agreed = False
        if agreed:
            return sides[0]
    raise ssl.SSLError("the handshake does not end")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))

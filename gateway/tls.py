"""TLS for clients' connections: what the gateway shows, and what clients believe."""

import os
import ssl
import stat
from pathlib import Path
from typing import Final

from shared.config import TlsConfig
from shared.errors import ConfigError

HANDSHAKE_S: Final = 10.0
"""How long a client may take to agree on TLS; it has no connection before."""
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def server_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Give what the gateway speaks TLS 1.2 or later with; none without a certificate.

    Raises:
        ConfigError: A file cannot be used, or others may read the key.
    """
    if tls.certificate is None or tls.key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load(context, tls)
    return context


def load(context: ssl.SSLContext, tls: TlsConfig) -> None:
    """Read certificate and key, again if they were renewed: connections that come from now on see them.

    Raises:
        ConfigError: A file cannot be used, or others may read the key.
    """
    if tls.certificate is None or tls.key is None:
        return
    try:
        _check_private(Path(tls.key))
        # A password in any case, or OpenSSL would ask for one at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password="")
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


def client_context(ca: Path | None) -> ssl.SSLContext:
    """Give what a client believes.

    Args:
        ca: PEM file of the only authorities that it trusts; none trusts the system's.

    Raises:
        ConfigError: The file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{ca} holds no certificates in PEM: {error.reason or error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the authority's certificate {ca}: {error.strerror}") from error


def own_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Give what a process on the gateway's machine believes: this very certificate, whatever names it has.

    Raises:
        ConfigError: The certificate cannot be used.
    """
    if tls.certificate is None:
        return None
    context = client_context(Path(tls.certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _check_private(key: Path) -> None:
    """Refuse a key that others may read; of root's, a group may (as of secrets that are mounted)."""
    found = key.stat()
    allowed = stat.S_IRGRP if found.st_uid == 0 and os.geteuid() != 0 else 0
    if stat.S_IMODE(found.st_mode) & _OTHERS & ~allowed:
        raise ConfigError(f"{key} (gateway.tls.key) may be used by others: chmod 600 it")

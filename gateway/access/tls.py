"""TLS of the gateway's own clients on its machine, and certificates in files."""

import re
import ssl
from pathlib import Path
from typing import Final

from omnirelay.errors import ConfigError
from shared.config import TlsConfig

HANDSHAKE_S: Final = 10.0
"""How long a client may take to agree on TLS; it has no connection before."""
_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python's ssl has no name for."""
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def own_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Give what a process on the gateway's machine believes: this very certificate, whatever it says.

    Its names and its dates are for clients; a gateway whose certificate has expired runs all the same.

    Raises:
        ConfigError: The certificate cannot be used.
    """
    if tls.certificate is None:
        return None
    try:
        return trusting_only(pem_certificates(Path(tls.certificate))[0])
    except (ValueError, IndexError, ssl.SSLError):
        raise ConfigError(
            f"{tls.certificate} (gateway.tls.certificate) holds no certificate in PEM"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {tls.certificate} (gateway.tls.certificate): {error.strerror}"
        ) from error


def trusting_only(der: bytes) -> ssl.SSLContext:
    """Give what believes one certificate and what it has signed, whatever names and dates there are.

    Raises:
        ssl.SSLError: It is none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    context.load_verify_locations(cadata=der)
    return context


def trusting_all() -> ssl.SSLContext:
    """Give what believes anybody: for those who learn nothing secret and tell nothing secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def pem_certificates(path: Path) -> list[bytes]:
    """The certificates of a PEM file, each as DER.

    Raises:
        OSError: It cannot be read.
        ValueError: One is not written in base64.
    """
    return [ssl.PEM_cert_to_DER_cert(text) for text in _PEM.findall(path.read_text(encoding="latin-1"))]

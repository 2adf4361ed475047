"""Client-side TLS contexts, and certificates in PEM files."""

import re
import ssl
from pathlib import Path
from typing import Final

from omnirelay.errors import ConfigError
from shared.config import TlsConfig

HANDSHAKE_S: Final = 10.0
"""Time limit of the TLS handshake."""
_NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python's ssl does not name."""
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def own_context(tls: TlsConfig) -> ssl.SSLContext | None:
    """Context for local processes: trusts exactly the gateway's certificate, whatever its names and dates."""
    if tls.certificate is None:
        return None
    try:
        return trusting_only(pem_certificates(Path(tls.certificate))[0])
    except (ValueError, IndexError, ssl.SSLError):
        raise ConfigError(f"{tls.certificate} (gateway.tls.certificate) has no PEM certificate") from None
    except OSError as error:
        problem = f"cannot read {tls.certificate} (gateway.tls.certificate): {error.strerror}"
        raise ConfigError(problem) from error


def trusting_only(der: bytes) -> ssl.SSLContext:
    """Context that trusts one certificate and those it has signed, whatever their names and dates."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VerifyFlags(_NO_CHECK_TIME)
    context.load_verify_locations(cadata=der)
    return context


def trusting_all() -> ssl.SSLContext:
    """Context without verification, for handshakes that carry no data."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def pem_certificates(path: Path) -> list[bytes]:
    """The certificates of a PEM file, as DER; OSError or ValueError if it cannot be read or decoded."""
    return [ssl.PEM_cert_to_DER_cert(text) for text in _PEM.findall(path.read_text(encoding="latin-1"))]

"""TLS of a client."""

import ssl
from pathlib import Path

from omnirelay.errors import ConfigError


def client_context(ca: Path | None) -> ssl.SSLContext:
    """The SSL context for a CA file in PEM; None is the system's trust store.

    Raises:
        ConfigError: The file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{ca} holds no certificates in PEM: {error.reason or error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read the authority's certificate {ca}: {error.strerror}") from error

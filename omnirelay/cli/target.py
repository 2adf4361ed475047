"""Which gateway a command connects to, and with which key."""

import argparse
import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omnirelay.client.aio import RECONNECT_S, AsyncClient
from omnirelay.client.types import DEFAULT_ADDRESS
from omnirelay.errors import ConfigError
from omnirelay.status import StatusReport
from omnirelay.values import API_KEY_VARIABLE


@dataclass(frozen=True)
class Target:
    """Addresses and credentials, as :class:`omnirelay.AsyncClient` takes them."""

    addresses: Sequence[str] = (DEFAULT_ADDRESS,)
    api_key: str | None = None
    ca: Path | ssl.SSLContext | None = None
    reconnect_s: float = RECONNECT_S

    def __repr__(self) -> str:
        """Omit the key."""
        return f"Target({self.addresses!r})"

    def __str__(self) -> str:
        """The addresses."""
        return ", ".join(self.addresses)

    def client(self) -> AsyncClient:
        """A client that is not connected yet."""
        return AsyncClient(self.addresses, self.api_key, self.ca, self.reconnect_s)

    async def status(self) -> StatusReport:
        """Ask for the status of the stack.

        Raises:
            OmniRelayError: The gateway does not answer.
        """
        async with self.client() as client:
            return await client.status()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`target_of` reads."""
    parser.add_argument(
        "--gateway",
        action="append",
        metavar="tcp://HOST:PORT",
        help="or tls://HOST:PORT; several if given again: the next goes on if one is lost",
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"file with the API key (default: the variable {API_KEY_VARIABLE})",
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="CA file in PEM (default: the system's trust store)"
    )


def target_of(arguments: argparse.Namespace) -> Target:
    """The target that the options name.

    Raises:
        ConfigError: The file of the key cannot be read.
    """
    return Target(arguments.gateway or (DEFAULT_ADDRESS,), _key(arguments.api_key_file), arguments.ca)


def _key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot read the API key in {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8, so it holds no API key") from None
    if not key or len(key.split()) != 1:
        raise ConfigError(f"{path} must hold an API key and nothing else")
    return key

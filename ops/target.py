"""The gateway of this machine's own configuration."""

import os
import ssl

from gateway.access import tls
from omnirelay.cli.target import Target
from omnirelay.values import API_KEY_VARIABLE
from shared.config import Config


def own_target(config: Config) -> Target:
    """Return the gateway of this machine's configuration, with the environment's API key.

    Raises:
        ConfigError: Its certificate cannot be used.
    """
    return _own(config, tls.own_context(config.gateway.tls), key=os.environ.get(API_KEY_VARIABLE) or None)


def probe_target(config: Config, number: int = 1) -> Target:
    """Return the gateway of this number of this machine's configuration, for status requests only.

    Status needs no key, and the report's process id is compared; so any certificate is accepted, as when
    the file was replaced after the gateway read it.
    """
    return _own(config, tls.trusting_all() if config.gateway.tls.certificate is not None else None, number)


def _own(config: Config, context: ssl.SSLContext | None, number: int = 1, key: str | None = None) -> Target:
    scheme = "tcp" if context is None else "tls"
    address = config.gateway.own_addresses(number)["listen"] or ""
    # A stack of one's own ends with its gateway.
    return Target((f"{scheme}://{address.removeprefix('tcp://')}",), key, context, 0)

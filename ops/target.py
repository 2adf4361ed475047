"""The gateway of this machine's own configuration."""

import ssl

from gateway.access import tls
from omnirelay.cli.target import Target
from shared.config import Config


def own_target(config: Config) -> Target:
    """Give the gateway of this machine's own configuration, without a key.

    Raises:
        ConfigError: Its certificate cannot be used.
    """
    return _own(config, tls.own_context(config.gateway.tls))


def probe_target(config: Config) -> Target:
    """Give the gateway of this machine's own configuration, to ask only how it is.

    Status needs no key, and the answer holds a process id to compare.  So any certificate will do, also one
    that was replaced on the disk since the gateway read it.
    """
    return _own(config, tls.trusting_all() if config.gateway.tls.certificate is not None else None)


def _own(config: Config, context: ssl.SSLContext | None) -> Target:
    scheme = "tcp" if context is None else "tls"
    return Target(f"{scheme}://{config.gateway.listen.removeprefix('tcp://')}", None, context)

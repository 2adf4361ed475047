"""The files by which the gateway knows its clients, and by which they know it."""

from pathlib import Path

from gateway import tls
from gateway.cli.doctor.finding import Findings, ok, problem, warning
from gateway.keys import read_keys
from shared.config import Config
from shared.errors import ConfigError

KEYS, TLS = "api-keys", "tls"


def check_access(config: Config) -> Findings:
    """Whether the file of keys and the certificate can be used, where there are some."""
    path = config.gateway.api_keys
    if path is not None:
        try:
            keys = read_keys(Path(path))
        except ConfigError as error:
            yield problem(KEYS, str(error), "omnirelay api-key NAME makes a key and the file")
        else:
            if keys:
                yield ok(KEYS, f"{path} has {len(keys)} keys")
            else:
                yield warning(
                    KEYS, f"{path} has no key: nobody can use the gateway", "omnirelay api-key NAME"
                )
    if config.gateway.tls.certificate is not None:
        try:
            tls.server_context(config.gateway.tls)
        except ConfigError as error:
            yield problem(TLS, str(error), "correct it, or leave gateway.tls out")
        else:
            yield ok(TLS, f"{config.gateway.tls.certificate} and its key can be used")

"""How the gateway knows its clients, and they it: keys, TLS, and who can reach it without."""

from pathlib import Path

from gateway import tls
from gateway.cli.doctor.finding import Findings, ok, problem, warning
from gateway.door import open_doors
from gateway.keys import read_keys
from shared.config import Config
from shared.errors import ConfigError

CLIENTS, KEYS, TLS = "clients", "api-keys", "tls"


def check_access(config: Config) -> Findings:
    """Who can use the gateway, and whether its keys and its certificate can be used, if there are any."""
    told = open_doors(config.gateway)
    for what in told:
        yield warning(CLIENTS, what, "set it, or let only a trusted network reach the gateway")
    if not told:
        yield ok(CLIENTS, "nobody but this machine reaches the gateway without a key and TLS")
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

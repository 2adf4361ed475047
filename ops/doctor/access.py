"""Check who can connect: the gateway's API keys and certificate, and the keys between the processes."""

import time
from pathlib import Path
from typing import Final

import zmq

from gateway.access.access import open_doors
from gateway.access.api_keys import read_keys
from gateway.access.certificate import SOON_S, read_certificate
from omnirelay.errors import ConfigError
from ops.doctor.finding import Findings, ok, problem, warning
from shared.config import Config, TlsConfig
from shared.config.values import is_local
from shared.messages import ROLES
from shared.transport.keys import load_keys, secret_file

CLIENTS, KEYS, TLS = "clients", "api-keys", "tls"


def check_access(config: Config) -> Findings:
    """Check who can reach the gateway, and that its API keys and certificate are usable."""
    reasons = open_doors(config.gateway)
    for what in reasons:
        yield warning(CLIENTS, what, "set it, or let only a trusted network reach the gateway")
    if not reasons:
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
                yield problem(KEYS, f"{path} holds no key: no gateway starts", "omnirelay api-key NAME")
    if config.gateway.tls.certificate is not None:
        yield from _check_certificate(config.gateway.tls)


def _check_certificate(tls: TlsConfig) -> Findings:
    try:
        found = read_certificate(tls)
    except ConfigError as error:
        yield problem(TLS, str(error), "correct it, or leave gateway.tls out")
        return
    now = time.time()
    valid = f"{found.path} and its key can be used {found.left(now)}"
    if why := found.why_not_now(now):
        yield problem(TLS, why, "renew it, or set the clock right; a running gateway reads it on SIGHUP")
    elif found.expires - now < SOON_S:
        yield warning(TLS, valid, "renew it; a running gateway reads it on SIGHUP")
    elif why := found.why_not_chained():
        yield warning(TLS, why, "put the certificates between it and its authority's behind it")
    else:
        yield ok(TLS, valid)


CHECK: Final = "keys"


def check_keys(config: Config) -> Findings:
    """Check that the keys are usable, or not needed."""
    if config.security.keys is not None:
        yield from _examine(Path(config.security.keys))
    elif all(is_local(address) for address in config.inner_addresses().values()):
        yield ok(CHECK, "none, and none are needed: the processes talk to each other on this machine alone")
    else:
        what = "none: security.internal_network says that nobody else is on the network between the processes"
        advice = "be sure of that, or make keys with `omnirelay keys DIR` and set security.keys"
        yield warning(CHECK, what, advice)


def _examine(directory: Path) -> Findings:
    if not zmq.has("curve"):
        what = "security.keys is set, and this ZeroMQ was built without CURVE"
        yield problem(CHECK, what, "install pyzmq's own wheel: pip install --only-binary :all: pyzmq")
        return
    here = [role for role in ROLES if secret_file(directory, role).exists()]
    if not here:
        what = f"{directory} has no .key_secret file: no process can start here"
        yield problem(CHECK, what, "make keys with `omnirelay keys DIR`, or copy those that you have")
    for role in here:
        try:
            load_keys(directory, role)
        except ConfigError as error:
            yield problem(CHECK, str(error), f"the {role} does not start before: docs/security.md")
        else:
            what = f"the {role} has its keys in {directory}, and only their owner can read the secret one"
            yield ok(CHECK, what)

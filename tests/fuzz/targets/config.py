"""What the operator writes; the first byte tells which file it is, or that it is the environment."""

import atexit
import os
import tempfile
from functools import cache
from pathlib import Path

import msgspec
import yaml
import zmq
from zmq.utils import z85

from gateway.access.account import Principal
from gateway.access.api_keys import ApiKeys, read_keys
from omnirelay.error_codes import to_event
from omnirelay.errors import BusyError, ConfigError
from omnirelay.protocol import Reply, pack
from shared.config import ENV_PREFIX, Config, TracingConfig, load_config
from shared.messages import ROLES
from shared.tracing.setup import ENDPOINT_VARIABLE, TRACES_VARIABLE, traces_url
from shared.transport.keys import load_keys, public_file, secret_file


def check(data: bytes) -> None:
    """Read it: it can be used, or a ConfigError says why not."""
    kind, rest = data[:1], data[1:]
    try:
        if kind == b"y":
            _check_yaml(rest)
        elif kind == b"e":
            _check_environment(rest)
        elif kind == b"a":
            _check_api_keys(rest)
        else:
            _check_curve_keys(kind, rest)
    except ConfigError:
        return


def _check_yaml(content: bytes) -> None:
    config = load_config(_written("config.yaml", content), {})
    values = config.model_dump(mode="json")
    assert Config.model_validate(yaml.safe_load(yaml.safe_dump(values))) == config


def _check_environment(content: bytes) -> None:
    """A line is a variable, without what all have in common."""
    environment = {}
    for line in os.fsdecode(content).split("\n"):
        name, _, value = line.partition("=")
        environment[ENV_PREFIX + name] = value
        environment[TRACES_VARIABLE] = environment[ENDPOINT_VARIABLE] = value
    config = load_config(None, environment)
    assert Config.model_validate(config.model_dump()) == config
    traces_url(TracingConfig(), environment)


def _check_api_keys(content: bytes) -> None:
    path = _written("keys.yaml", content)
    entries = read_keys(path)
    for name, entry in entries.items():
        client = Principal(name, entry)
        client.open()
        try:
            client.check()
        except BusyError as error:
            pack(Reply(1, to_event(error)))
    assert list(ApiKeys(path)._clients) == list(entries)
    again = yaml.safe_dump(msgspec.to_builtins(entries), sort_keys=False).encode()
    assert read_keys(_written("again.yaml", again)) == entries


def _check_curve_keys(kind: bytes, content: bytes) -> None:
    """One file of a directory that is as it should be otherwise."""
    directory = _keys()
    path = secret_file(directory, "gateway") if kind == b"s" else public_file(directory, "thinker")
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        keys = load_keys(directory, "gateway")
    finally:
        path.write_bytes(before)
    assert set(keys.public) == set(ROLES)
    assert zmq.curve_public(keys.secret) == keys.public["gateway"]


def _written(name: str, content: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(content)
    return path


@cache
def _folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="fuzz-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@cache
def _keys() -> Path:
    """Keys that are the same in every run."""
    directory = _folder() / "keys"
    directory.mkdir()
    for number, role in enumerate(ROLES):
        secret = z85.encode(bytes([number + 1]) * 32)
        public = f'public-key = "{zmq.curve_public(secret).decode()}"\n'
        public_file(directory, role).write_text(public)
        secret_file(directory, role).write_text(f'{public}secret-key = "{secret.decode()}"\n')
        secret_file(directory, role).chmod(0o600)
    return directory

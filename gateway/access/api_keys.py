"""API keys: lasting ones, stored in a file as hashes, and ephemeral ones that their holders have made."""

import asyncio
import hashlib
import logging
import re
import secrets
import stat
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import yaml
from msgspec import Meta
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from gateway.access.account import NO_KEY, ClientLimits, Principal
from gateway.fairness.quota import Hold, Quota
from omnirelay.errors import BusyError, ConfigError, UnauthenticatedError
from shared.config import NOT_YAML
from shared.metrics import counter, gauge

PREFIX: Final = "omr_"
"""Lets people and secret scanners recognize a key."""
KEY_BYTES: Final = 32
MAX_KEYS: Final = 1000
"""Each has metrics of its own."""
MAX_FILE_BYTES: Final = 2**20
NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

log = logging.getLogger(__name__)


class KeyEntry(ClientLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of the keys file, with the key's SHA-256 in hexadecimal."""

    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


def new_key() -> str:
    """A new key with 256 random bits, so that a plain hash is safe."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_of(key: str) -> str:
    """The hash that the file holds."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read_keys(path: Path) -> dict[str, KeyEntry]:
    """Read the entries of a keys file by name; ConfigError, which quotes only names, if it is invalid."""
    text = _read(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except NOT_YAML as error:
        # Not the parser's message, which quotes the line: it may hold a key.
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path} (gateway.api_keys) is not YAML{where}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise ConfigError(f"{path} (gateway.api_keys) must map names of keys to their entries")
    if len(root.value) != len(values):
        raise ConfigError(f"{path} (gateway.api_keys) names a key twice")
    return _entries(path, values)


def _entries(path: Path, values: dict[object, object]) -> dict[str, KeyEntry]:
    if len(values) > MAX_KEYS:
        raise ConfigError(f"{path} (gateway.api_keys) has {len(values)} keys, at most {MAX_KEYS} are allowed")
    entries = {}
    for number, (name, value) in enumerate(values.items(), 1):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ConfigError(f"{path} (gateway.api_keys): name {number} must match {NAME.pattern}")
        try:
            entries[name] = msgspec.convert(value, KeyEntry)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path} (gateway.api_keys), {name}: {error}") from None
    if len({entry.sha256 for entry in entries.values()}) != len(entries):
        raise ConfigError(f"{path} (gateway.api_keys) has one key under two names")
    return entries


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if stat.S_IMODE(path.stat().st_mode) & _OTHERS_WRITE:
                raise ConfigError(f"{path} (gateway.api_keys) is writable by others: chmod go-w it")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path} (gateway.api_keys): {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} (gateway.api_keys) has more than {MAX_FILE_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} (gateway.api_keys) is not UTF-8") from None


class ApiKeys(Collector):
    """The known keys and their clients; without a path no keys are needed."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.needed: Final = path is not None
        self._entries: dict[str, KeyEntry] = {}
        self._clients: dict[str, Principal] = {}
        self._by_hash: dict[str, Principal] = {}
        # Counts of removed keys: their names may return, and counters must not decrease.
        self._counted: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self.take(self.read())

    def read(self) -> dict[str, KeyEntry]:
        """Read the file, for :meth:`take`; ConfigError if it is unreadable, invalid or empty."""
        if self._path is None:
            return {}
        keys = read_keys(self._path)
        if not keys:
            raise ConfigError(
                f"{self._path} (gateway.api_keys) holds no key, so every client would be rejected: "
                "add one with 'omnirelay api-key NAME'"
            )
        return keys

    def take(self, entries: dict[str, KeyEntry]) -> None:
        """Replace the known keys; a removed one is invalid from now on."""
        clients = {}
        for name, entry in entries.items():
            before = self._entries.get(name)
            if before is not None and before.sha256 == entry.sha256:
                clients[name] = self._clients[name]
                if before != entry:
                    clients[name].change(entry)
        for name, client in self._clients.items():
            client.known = name in clients
            if not client.known:
                self._counted[name] = client.taken, client.refused
        for name in [name for name in entries if name not in clients]:
            taken, refused = self._counted.pop(name, (0, 0))
            clients[name] = Principal(f"key {name}", entries[name], True, taken, refused, keyed=True)
        while len(self._counted) > MAX_KEYS:
            self._counted.popitem(last=False)
        self._entries, self._clients = entries, clients
        self._by_hash = {entry.sha256: clients[name] for name, entry in entries.items()}

    def client(self, key: str | None) -> Principal:
        """The client of a key, or UnauthenticatedError; the timing of a look-up by hash reveals no key."""
        found = self._by_hash.get(hash_of(key)) if key else None
        if found is None:
            raise UnauthenticatedError(NO_KEY)
        return found

    def collect(self) -> Iterator[Metric]:
        """Metrics by key name."""
        clients = self._clients.items()
        yield counter(
            "omnirelay_key_requests_total",
            "Requests with an API key, by its name (`key`): `outcome` is `taken` or `busy`.",
            (
                ({"key": name, "outcome": outcome}, count)
                for name, client in clients
                for outcome, count in (("taken", client.taken), ("busy", client.refused))
            ),
        )
        opened = (({"key": name}, client.open_requests) for name, client in clients)
        yield gauge("omnirelay_key_open_requests", "Open requests of a `key`.", opened)


EPHEMERAL_PREFIX: Final = "ek_"
MAX_EPHEMERAL: Final = 4096
"""Of all clients together; of one, four fifths."""
EXPIRED: Final = "missing, invalid or expired ephemeral key: have a new one made"
RETRY_MS: Final = 5000


@dataclass(frozen=True)
class EphemeralKey:
    """What a key stands for: the client that had it made, and fields of the session that it opens.

    The fields are JSON: parsed, they may take twenty times the memory that was reserved for them.
    """

    maker: Principal
    session: bytes


class EphemeralKeys(Collector):
    """The keys that have not expired, in memory: none outlives the process."""

    def __init__(self) -> None:
        self._quota = Quota(MAX_EPHEMERAL)
        self._by_hash: dict[str, EphemeralKey] = {}

    def make(self, key: EphemeralKey, share: str, hold: Hold, seconds: float) -> str:
        """Return a new key, valid for some seconds; BusyError if there are too many.

        Args:
            share: The quota that it counts in.
            hold: The memory of its session, released when it expires.
        """
        if not self._quota.has_for(share):
            used, own = self._quota.used, self._quota.own(share)
            problem = f"{used} ephemeral keys are valid, {own} of them this client's: try again later"
            raise BusyError(problem, RETRY_MS)
        self._quota.take(share)
        value = EPHEMERAL_PREFIX + secrets.token_urlsafe(KEY_BYTES)
        hashed = hash_of(value)
        self._by_hash[hashed] = key

        def expire() -> None:
            del self._by_hash[hashed]
            self._quota.give(share)
            hold.release()

        asyncio.get_running_loop().call_later(seconds, expire)
        return value

    def collect(self) -> Iterator[Metric]:
        """The number of keys."""
        yield gauge("omnirelay_client_secrets", "Valid ephemeral keys.", [({}, len(self._by_hash))])

    def find(self, value: str) -> EphemeralKey:
        """What a key stands for, or UnauthenticatedError; the timing of a look-up by hash reveals no key."""
        found = self._by_hash.get(hash_of(value))
        if found is None:
            raise UnauthenticatedError(EXPIRED)
        return found

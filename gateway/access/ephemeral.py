"""Ephemeral keys: short-lived, for one purpose, and made by the holder of a lasting key."""

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.access.api_keys import KEY_BYTES, hash_of
from gateway.access.clients import Principal
from gateway.fairness.memory_budget import Hold
from gateway.fairness.quota import Quota
from omnirelay.errors import BusyError, UnauthenticatedError

PREFIX: Final = "ek_"
MAX_KEYS: Final = 4096
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
        self._quota = Quota(MAX_KEYS)
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
        value = PREFIX + secrets.token_urlsafe(KEY_BYTES)
        hashed = hash_of(value)
        self._by_hash[hashed] = key

        def expire() -> None:
            del self._by_hash[hashed]
            self._quota.give(share)
            hold.release()

        asyncio.get_running_loop().call_later(seconds, expire)
        return value

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """The number of keys."""
        number = len(self._by_hash)
        return [GaugeMetricFamily("omnirelay_client_secrets", "Valid ephemeral keys.", number)]

    def find(self, value: str) -> EphemeralKey:
        """What a key stands for, or UnauthenticatedError; the timing of a look-up by hash reveals no key."""
        found = self._by_hash.get(hash_of(value))
        if found is None:
            raise UnauthenticatedError(EXPIRED)
        return found

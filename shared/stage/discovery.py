"""Where the gateways are: what the configuration lists now, and the addresses behind its names."""

import ipaddress
import logging
import socket
import threading
from pathlib import Path
from typing import Final

from omnirelay.errors import ConfigError
from shared.config import GatewayAddresses, GatewayConfig, load_config
from shared.config.gateway import MAX_GATEWAYS
from shared.config.values import WILDCARDS, host_of, is_local
from shared.log import limited

LOOK_S: Final = 1.0
"""Time between two looks."""
MOST: Final = 2 * MAX_GATEWAYS
"""Addresses that are followed: as many as ``gateway.replicas`` and ``gateway.others`` may give together."""

log = logging.getLogger(__name__)


class GatewayFinder(threading.Thread):
    """Looks for the gateways again and again, beside the loop, because a name server may take long.

    A name stands for a gateway at each of its IPv4 addresses.  While it cannot be resolved, its addresses are
    those of before.

    Args:
        path: The configuration's file, as :func:`shared.config.load_config` takes it.

    Attributes:
        found: The gateways' addresses as last seen.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__(name="gateways", daemon=True)
        self.found: tuple[GatewayAddresses, ...] = ()
        self._path = path
        self._listed: list[GatewayAddresses] = []
        self._resolved: dict[str, list[str]] = {}
        self._reload = False
        self._stopping = threading.Event()

    def begin(self, gateway: GatewayConfig) -> None:
        """Start with what is configured; names are resolved in the thread."""
        self._listed = gateway.addresses
        self.found = tuple(each for each in self._listed if _name(each) is None)
        self.start()

    def reload(self) -> None:
        """Read the configured addresses again; safe to call from a signal handler, and before the start."""
        self._reload = True

    def stop(self) -> None:
        """End soon; nothing waits for a name server."""
        self._stopping.set()

    def run(self) -> None:
        """Look until :meth:`stop`."""
        while not self._stopping.is_set():
            if self._reload:
                self._reload = False
                self._read()
            found = self._look()
            if found != self.found:
                self.found = found
                log.info("gateways may be at %s", ", ".join(each.control for each in found) or "no address")
            self._stopping.wait(LOOK_S)

    def _read(self) -> None:
        try:
            self._listed = load_config(self._path).gateway.addresses
        except ConfigError as error:
            log.error("SIGHUP: the gateways' addresses stay as they are: %s", error)
        else:
            log.info("SIGHUP: read the gateways' addresses again")

    def _look(self) -> tuple[GatewayAddresses, ...]:
        names = {name for name in map(_name, self._listed) if name is not None}
        self._resolved = {name: self._resolve(name) for name in names}
        found = {}
        for each in self._listed:
            name = _name(each)
            for place in [each] if name is None else [_at(each, host) for host in self._resolved[name]]:
                found[place.control] = place
        if len(found) > MOST:
            limited(log).warning("%d addresses of gateways were found: %d are used", len(found), MOST)
        return tuple(found.values())[:MOST]

    def _resolve(self, name: str) -> list[str]:
        try:
            rows = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            limited(log).warning("cannot resolve %s, where gateways should be: %s", name, error)
            return self._resolved.get(name, [])
        return sorted({str(row[4][0]) for row in rows}, key=ipaddress.ip_address)


def _name(addresses: GatewayAddresses) -> str | None:
    """The name of a gateway's host; None for an address, and for two hosts."""
    host = host_of(addresses.control)
    if host != host_of(addresses.events) or host in WILDCARDS or is_local(addresses.control):
        return None
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    return None


def _at(addresses: GatewayAddresses, host: str) -> GatewayAddresses:
    """The same ports at one of the name's addresses."""
    events, control = (
        f"tcp://{host}:{each.rpartition(':')[2]}" for each in (addresses.events, addresses.control)
    )
    return GatewayAddresses(events=events, control=control)

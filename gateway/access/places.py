"""Connection limits of a server, shared fairly among addresses and keys."""

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from gateway.fairness.quota import Quota

SUBSCRIBER_BITS: Final = 64
"""IPv6 addresses with this prefix in common count as one."""


class Proxies:
    """Trusted proxies (addresses or networks), whose ``X-Forwarded-For`` is believed."""

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks: Final = [ipaddress.ip_network(each) for each in networks]

    def __contains__(self, address: str) -> bool:
        found = _parsed(address)
        return found is not None and any(found in each for each in self._networks)

    def client(self, forwarded: Iterable[str]) -> str | None:
        """The client behind the proxies, each of which has appended what it saw to ``X-Forwarded-For``."""
        for each in reversed(",".join(forwarded).split(",")):
            address = without_port(each.strip())
            if _parsed(address) is None:
                return None
            if address not in self:
                return address
        return None


@dataclass(eq=False)
class Place:
    """One connection's place; ``holder`` is an address or a key, and ``idle`` ones may be closed for room."""

    _places: "Places"
    holder: str
    hang_up: Callable[[], None]
    idle: Callable[[], bool] = lambda: False

    def move(self, holder: str) -> bool:
        """Transfer it to another holder; false, and it is not, if that exceeds the holder's share."""
        places = self._places
        if holder == self.holder or self not in places.taken:
            return True
        places.quota.give(self.holder)
        if fits := places.quota.has_for(holder):
            self.holder = holder
        places.quota.take(self.holder)
        return fits

    def leave(self) -> None:
        """Free it; may be called again."""
        if self in self._places.taken:
            del self._places.taken[self]
            self._places.quota.give(self.holder)


class Places:
    """The places of a server, limited per holder by a quota; proxies are exempt."""

    def __init__(self, total: int, proxies: Proxies) -> None:
        self.quota: Final = Quota(total)
        self._proxies: Final = proxies
        self.taken: dict[Place, None] = {}

    def take(
        self, address: str, hang_up: Callable[[], None], idle: Callable[[], bool] = lambda: False
    ) -> Place | None:
        """Take a place for a connection, which ``hang_up`` closes; none if its address gets no more."""
        holder = holder_of(address)
        trusted = address in self._proxies
        if not self.quota.free and (trusted or not self.quota.own(holder)):
            self._make_room()
        enough = self.quota.free > 0 if trusted else self.quota.has_for(holder)
        if not enough:
            return None
        place = Place(self, holder, hang_up, idle)
        self.taken[place] = None
        self.quota.take(holder)
        return place

    def _make_room(self) -> None:
        """Close the oldest idle connection of the holder with the most places, if it has several."""
        idle = [place for place in self.taken if place.idle()]
        victim = max(idle, key=lambda place: self.quota.own(place.holder), default=None)
        if victim is not None and self.quota.own(victim.holder) > 1:
            victim.leave()
            victim.hang_up()


def holder_of(address: str) -> str:
    """The holder that an address counts as; IPv6 addresses by their network."""
    found = _parsed(address)
    if found is None or found.version == 4:
        return f"address {address}"
    return f"address {found.ipv4_mapped or ipaddress.ip_network((found, SUBSCRIBER_BITS), strict=False)}"


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


def without_port(address: str) -> str:
    """The address, or host, of ``[ADDRESS]:PORT`` or ``ADDRESS:PORT``."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address

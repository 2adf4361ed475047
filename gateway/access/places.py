"""Connection limits of a server, shared fairly among addresses and keys."""

import ipaddress
from collections.abc import Callable, Iterable
from typing import Final

from gateway.fairness.quota import Quota

MAX_WATCHERS: Final = 64
"""Open connections of the monitor; beyond it the oldest is closed."""
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
        """The client behind the proxies; none if the header does not tell.

        Args:
            forwarded: Values of ``X-Forwarded-For``; each proxy appends the address that it sees.
        """
        for each in reversed(",".join(forwarded).split(",")):
            address = _without_port(each.strip())
            if _parsed(address) is None:
                return None
            if address not in self:
                return address
        return None


class Place:
    """One connection's place.

    Attributes:
        holder: An address, or the name of a key.
        idle: Whether the connection may be closed to make room.
    """

    def __init__(self, places: "Places", holder: str, hang_up: Callable[[], None]) -> None:
        self._places: Final = places
        self.holder = holder
        self.hang_up: Final = hang_up
        self.idle: Callable[[], bool] = lambda: False

    def move(self, holder: str) -> bool:
        """Transfer it to another holder.

        Returns:
            False if that exceeds the holder's share.
        """
        return holder == self.holder or self._places.move(self, holder)

    def leave(self) -> None:
        """Free it; may be called again."""
        self._places.leave(self)


class Places:
    """The places of a server, limited per holder by a quota; proxies are exempt."""

    def __init__(self, total: int, proxies: Proxies) -> None:
        self._quota: Final = Quota(total)
        self._proxies: Final = proxies
        self._taken: dict[Place, None] = {}

    def take(self, address: str, hang_up: Callable[[], None]) -> Place | None:
        """Take a place for a connection, which ``hang_up`` closes; none if its address gets no more."""
        holder = holder_of(address)
        trusted = address in self._proxies
        if not self._quota.free and (trusted or not self._quota.own(holder)):
            self._make_room()
        enough = self._quota.free > 0 if trusted else self._quota.has_for(holder)
        return self._add(holder, hang_up) if enough else None

    def move(self, place: Place, holder: str) -> bool:
        """See :meth:`Place.move`."""
        if place not in self._taken:
            return True
        self._quota.give(place.holder)
        fits = self._quota.has_for(holder)
        self._quota.take(holder)
        place.holder = holder
        return fits

    def leave(self, place: Place) -> None:
        """See :meth:`Place.leave`."""
        if place in self._taken:
            del self._taken[place]
            self._quota.give(place.holder)

    def _make_room(self) -> None:
        """Close the oldest idle connection of the holder with the most places, if it has several."""
        idle = [place for place in self._taken if place.idle()]
        victim = max(idle, key=lambda place: self._quota.own(place.holder), default=None)
        if victim is not None and self._quota.own(victim.holder) > 1:
            victim.leave()
            victim.hang_up()

    def _add(self, holder: str, hang_up: Callable[[], None]) -> Place:
        place = Place(self, holder, hang_up)
        self._taken[place] = None
        self._quota.take(holder)
        return place


class WatchersPlaces(Places):
    """Places of which the oldest connection is closed for a new one."""

    def take(self, address: str, hang_up: Callable[[], None]) -> Place:
        """Take a place for a connection."""
        while not self._quota.free:
            oldest = next(iter(self._taken))
            oldest.leave()
            oldest.hang_up()
        return self._add(holder_of(address), hang_up)


def holder_of(address: str) -> str:
    """The holder that an address counts as; IPv6 addresses by their network."""
    found = _parsed(address)
    if found is not None and found.version == 6:
        mapped = found.ipv4_mapped
        found_in = ipaddress.ip_network((found, SUBSCRIBER_BITS), strict=False)
        return f"address {mapped if mapped is not None else found_in}"
    return f"address {address}"


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None


def _without_port(address: str) -> str:
    """The address of ``[ADDRESS]:PORT`` or ``ADDRESS:PORT``."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address

"""Bounds on what strangers can do to a call's UDP sockets."""

from typing import Any, Final

from aioice import Connection, stun
from aiortc import RTCIceTransport

MAX_ADDRESSES: Final = 16
"""From which a client may send checks: each is answered by checks of our own."""
MAX_EARLY: Final = 64
"""Datagrams that are kept until the connection is there."""


def restrict(transport: RTCIceTransport, addresses: list[str]) -> None:
    """Restrict the connection of a transport that has not gathered candidates yet.

    It binds these addresses only (if there are any), and what comes without the user name of this call is not
    answered, or it could be made to send to an address that a packet pretends to come from.  aioice has
    neither settings nor limits for that; the methods that are replaced are those that its own sockets call.
    """
    _Restricted(transport, transport._connection, addresses)


class _Restricted:
    def __init__(self, transport: RTCIceTransport, connection: Connection, addresses: list[str]) -> None:
        self._transport = transport
        self._connection = connection
        self._addresses = addresses
        self._early = 0
        self._gather = connection.get_component_candidates
        self._request_received = connection.request_received
        self._data_received = connection.data_received
        connection.get_component_candidates = self.gather  # type: ignore[method-assign]
        connection.request_received = self.request_received  # type: ignore[method-assign]
        connection.data_received = self.data_received  # type: ignore[method-assign]

    async def gather(self, component: int, addresses: list[str], timeout: int = 5) -> Any:
        """Bind sockets."""
        return await self._gather(component, self._addresses or addresses, timeout)

    def request_received(self, message: stun.Message, addr: tuple[str, int], protocol: Any) -> None:
        """Take a check of an address that is known or one of few."""
        name = message.attributes.get("USERNAME", "")
        known = [(each.host, each.port) for each in self._connection.remote_candidates]
        if (
            message.message_method == stun.Method.BINDING
            and "MESSAGE-INTEGRITY" in message.attributes
            and name.startswith(f"{self._connection.local_username}:")
            and (addr in known or len(known) < MAX_ADDRESSES)
        ):
            self._request_received(message, addr, protocol)

    def data_received(self, data: bytes, component: int) -> None:
        """Take a datagram of the connection, or one of a few before it is there."""
        if self._transport.state != "completed":
            self._early += 1
            if self._early > MAX_EARLY:
                return
        self._data_received(data, component)

"""Options that all ZeroMQ sockets share: CURVE, and detection of dead connections."""

import errno
from typing import Any, Final

import zmq

from omnirelay.errors import AddressInUseError, ConfigError
from shared.messages import Role
from shared.transport.curve import Link, guard_client, guard_server

LINGER_MS: Final = 500
"""How long a closing socket may deliver what it holds."""
SILENT_LINK_MS: Final = 10_000
"""How long a peer's machine may leave data unacknowledged before the connection is closed.  That includes a
process in a long step that reads nothing, once the buffers of both are full."""
CONNECT_MS: Final = 2000
"""Timeout of an attempt to connect: the kernel's own pauses between retries keep growing."""


def address_in_use(address: str) -> AddressInUseError:
    """The error for a configured address on which another process listens."""
    return AddressInUseError(
        f"{address} is in use: is another OmniRelay process running there? "
        "Stop it, or set another address in the configuration."
    )


def bind(socket: zmq.Socket[Any], address: str) -> None:
    """Bind a socket, or close it and raise.

    Raises:
        AddressInUseError: Another process listens there.
        ConfigError: The address cannot be used, or not without keys.
    """
    try:
        _prepare(socket, address)
        guard_server(socket, address)
        socket.bind(address)
    except ConfigError:
        socket.close()
        raise
    except zmq.ZMQError as error:
        socket.close()
        if error.errno == errno.EADDRINUSE:
            raise address_in_use(address) from error
        raise ConfigError(f"cannot listen on {address}: {error}") from error


def _prepare(socket: zmq.Socket[Any], address: str) -> None:
    """Use the address's family, and close connections to machines that no longer answer."""
    # Not always: the socket of a wildcard would then report IPv4 peers as ::ffff:A.B.C.D.
    socket.set(zmq.IPV6, "[" in address)
    socket.set(zmq.TCP_MAXRT, SILENT_LINK_MS)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, SILENT_LINK_MS // 2000)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 1)


def connect(socket: zmq.Socket[Any], address: str, server: Role | None = None) -> Link:
    """Connect a socket, or close it and raise; ZeroMQ retries until the peer is there.

    Args:
        server: The peer's role; required if the processes have keys.

    Raises:
        ConfigError: The address cannot be used, or not without keys.
    """
    try:
        _prepare(socket, address)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        link = guard_client(socket, address, server)
        socket.connect(address)
    except ConfigError:
        socket.close()
        raise
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"cannot connect to {address}: {error}") from error
    return link

"""Sockets of ZeroMQ as all edges want them: guarded, and with an end to silence.

Addresses come from the configuration only.
"""

import errno
from typing import Any, Final

import zmq

from omnirelay.errors import AddressInUseError, ConfigError
from shared.transport.curve import Link, guard_client, guard_server
from shared.transport.keys import Role

LINGER_MS: Final = 500
"""How long a closing socket may try to deliver what it took."""
SILENT_LINK_MS: Final = 10_000
"""How long a peer's machine may leave what it is sent unacknowledged before the connection is given up.  One
that takes nothing because its process is in a long step counts too, once the buffers of both are full."""
CONNECT_MS: Final = 2000
"""How long an attempt to connect may take before the next: the kernel's own pauses become ever longer."""


def address_in_use(address: str) -> AddressInUseError:
    """The error for an address of the configuration on which somebody else listens."""
    return AddressInUseError(
        f"{address} is in use: is another OmniRelay process running there? "
        "Stop it, or set another address in the configuration."
    )


def bind(socket: zmq.Socket[Any], address: str) -> None:
    """Bind a socket, or close it and say clearly why it could not be bound.

    Raises:
        AddressInUseError: Another process listens there.
        ConfigError: The address cannot be used at all, or not without keys.
    """
    try:
        _bound_silence(socket)
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


def _bound_silence(socket: zmq.Socket[Any]) -> None:
    """Give up connections to machines from which nothing is heard, whether or not something is sent there."""
    socket.set(zmq.TCP_MAXRT, SILENT_LINK_MS)
    socket.set(zmq.TCP_KEEPALIVE, 1)
    socket.set(zmq.TCP_KEEPALIVE_IDLE, SILENT_LINK_MS // 2000)
    socket.set(zmq.TCP_KEEPALIVE_INTVL, 1)


def connect(socket: zmq.Socket[Any], address: str, server: Role | None = None) -> Link:
    """Connect a socket, or close it and say clearly why it could not be connected.

    A peer that is not there yet is no error: ZeroMQ goes on trying.

    Args:
        socket: The socket.
        address: Where to.
        server: Whose process listens there; needed where the processes have keys.

    Returns:
        Tells how the connection is.

    Raises:
        ConfigError: The address cannot be used at all, or not without keys.
    """
    try:
        _bound_silence(socket)
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

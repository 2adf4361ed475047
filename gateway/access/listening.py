"""Listening sockets, and running out of file descriptors."""

import asyncio
import errno
import logging
import os
import resource
import socket
import time
from typing import Any, Final

from omnirelay.errors import AddressInUseError, ConfigError
from omnirelay.protocol import parse_tcp
from shared.http import BACKLOG
from shared.log import limited

_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
RESERVED_FILES: Final = 80
"""File descriptors that clients leave to the monitor and to the gateway itself."""
_PAUSE_S: Final = 0.5
"""Less than asyncio's pause, so that its next attempt is a real one."""
log = logging.getLogger(__name__)


class ListeningSocket(socket.socket):
    """Reports a shortage of descriptors once, for asyncio tries to accept the whole backlog in one go."""

    reserved = 0
    _short_until = 0.0

    def accept(self) -> tuple[socket.socket, Any]:
        """See :meth:`socket.socket.accept`."""
        if time.monotonic() < self._short_until:
            raise BlockingIOError(errno.EAGAIN, "no descriptors a moment ago")
        try:
            self._require_room()
            return super().accept()
        except OSError as error:
            if error.errno in _SHORTAGES:
                self._short_until = time.monotonic() + _PAUSE_S
            raise

    def _require_room(self) -> None:
        """Raise as the system would without the reserved descriptors."""
        if not self.reserved:
            return
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The next descriptor is always the lowest that is free.
        following = os.dup(self.fileno())
        os.close(following)
        if most != resource.RLIM_INFINITY and following >= most - min(self.reserved, most // 4):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def listen(address: str, key: str, reserved: int = RESERVED_FILES) -> list[socket.socket]:
    """Listen on all addresses of a host; AddressInUseError or ConfigError if that is not possible.

    Args:
        address: ``tcp://HOST:PORT``.
        key: The address's key in the configuration.
        reserved: Descriptors that its connections may not use.
    """
    host, port = parse_tcp(address)
    sockets: list[socket.socket] = []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, place in dict.fromkeys(found):
            made = socket.create_server(place[:2], family=family, backlog=BACKLOG)
            listening = ListeningSocket(fileno=made.detach())
            listening.reserved = reserved
            sockets.append(listening)
    except OSError as error:
        for each in sockets:
            each.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"{address} is in use: is another gateway or another program running there? "
                f"Stop it, or set another {key} in the configuration."
            ) from error
        raise ConfigError(f"cannot listen on {address} ({key}): {error}") from error
    return sockets


def tell_shortage(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The loop's exception handler: logs a shortage of descriptors in one line, all else as asyncio does."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _SHORTAGES and "socket" in context:
        limited(log, burst=1).error(
            "cannot accept connections: %s; raise the limit of open files (ulimit -n)", error.strerror
        )
    else:
        loop.default_exception_handler(context)

"""uvicorn with bounded connections, as a part of a process."""

import asyncio
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from shared.http import BACKLOG
from shared.http.protocol import KEEP_ALIVE_S, BoundedProtocol, Malformed, Places

MAX_WATCHERS: Final = 64
"""Open connections for health checks and metrics; beyond it the oldest is closed."""
FAREWELL_S: Final = 1
"""Time for the last events to be sent at shutdown; an integer, as uvicorn requires."""


class BoundedServer(uvicorn.Server):
    """A server without signal handlers; ``serve`` runs until ``should_exit``.

    Args:
        app: The application.
        places: Bounds the connections.
        malformed: Builds the response to an invalid request.
        tls: TLS options of :meth:`asyncio.loop.create_server`.
        state: Each connection's state at its start.
        **options: Of uvicorn.
    """

    def __init__(
        self,
        app: ASGIApp,
        places: Places,
        malformed: Malformed,
        *,
        tls: Mapping[str, Any] | None = None,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._places = places
        self._malformed = malformed
        self._tls = tls or {}
        self._state = state or {}
        self.servers = []
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FAREWELL_S,
                **options,
            )
        )

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, but with time limits on TLS handshakes and shutdowns."""
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(self.protocol, sock=each, backlog=BACKLOG, **self._tls)
            for each in sockets or []
        ]
        self.started = True

    def protocol(self) -> BoundedProtocol:
        """Build the protocol of one connection."""
        return BoundedProtocol(
            self._places, self._malformed, self.config, self.server_state, dict(self._state)
        )

    def abort(self) -> None:
        """Close all connections without delivering what is unsent."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield


@dataclass(eq=False)
class _Watcher:
    """A place of :class:`WatchersPlaces`."""

    taken: "dict[_Watcher, None]"
    hang_up: Callable[[], None]

    def leave(self) -> None:
        """Free it; may be called again."""
        self.taken.pop(self, None)


class WatchersPlaces:
    """Places of which the oldest connection is closed for a new one: idle ones keep nobody out."""

    def __init__(self) -> None:
        self.taken: dict[_Watcher, None] = {}

    def take(self, address: str, hang_up: Callable[[], None], idle: Callable[[], bool]) -> _Watcher:
        """Take a place for a connection, of any address."""
        del address, idle
        while len(self.taken) >= MAX_WATCHERS:
            oldest = next(iter(self.taken))
            oldest.leave()
            oldest.hang_up()
        place = _Watcher(self.taken, hang_up)
        self.taken[place] = None
        return place

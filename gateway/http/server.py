"""uvicorn inside the gateway's event loop."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from gateway.access.access import TlsOptions
from gateway.access.listening import BACKLOG, RESERVED_FILES, listen
from gateway.access.places import MAX_WATCHERS, Places, WatchersPlaces
from gateway.fairness.uploads import UploadRoom
from gateway.http.app import make_app, make_monitor_app
from gateway.http.context import HttpContext
from gateway.http.protocol import KEEP_ALIVE_S, MAX_HEAD_BYTES, BoundedProtocol
from gateway.http.realtime.protocol import MAX_MESSAGE_BYTES, UPLOADS, BoundedWebSocket

FAREWELL_S: Final = 1
"""Time for the last events to be sent at shutdown; an integer, as uvicorn requires."""


def api_server(address: str, context: HttpContext) -> "HttpServer":
    """Build the server for clients at ``tcp://HOST:PORT``."""
    access = context.access
    app, options = make_app(context), access.server_options
    return HttpServer(
        app, access.http_places, context.uploads, options, address, "gateway.http", RESERVED_FILES
    )


def monitor_server(address: str, context: HttpContext) -> "HttpServer":
    """Build the server for health checks and metrics, which clients cannot block."""
    places = WatchersPlaces(MAX_WATCHERS, context.access.proxies)
    return HttpServer(
        make_monitor_app(address, context), places, context.uploads, {}, address, "gateway.monitor", 0
    )


class HttpServer(uvicorn.Server):
    """uvicorn as a part of a process.

    Args:
        app: The application.
        places: Bounds the connections.
        uploads: Memory for large WebSocket messages.
        options: TLS.
        address: ``tcp://HOST:PORT``.
        key: The address's key in the configuration.
        reserved: File descriptors that its connections may not use.
    """

    def __init__(
        self,
        app: ASGIApp,
        places: Places,
        uploads: UploadRoom,
        options: TlsOptions,
        address: str,
        key: str,
        reserved: int,
    ) -> None:
        self._options = options
        self._places = places
        self._uploads = uploads
        self._listen = partial(listen, address, key, reserved)
        self._serving: asyncio.Task[None] | None = None
        self.servers = []
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws=BoundedWebSocket,
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=FAREWELL_S,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            )
        )

    async def start(self) -> None:
        """Listen; errors are those of :func:`gateway.access.listening.listen`."""
        self._serving = asyncio.create_task(self.serve(await self._listen()))

    @property
    def answering(self) -> bool:
        """Whether a response is incomplete; WebSockets do not count."""
        connections = self.server_state.connections
        return any(isinstance(each, BoundedProtocol) and each.answering for each in connections)

    def stop_listening(self) -> None:
        """Accept no more connections; those that are open stay."""
        for each in self.servers:
            each.close()

    async def close(self) -> None:
        """Stop, and close connections after :data:`FAREWELL_S`; the gateway must be closed first."""
        if self._serving is None:
            return
        self.should_exit = True
        await self._serving
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, but with time limits on TLS handshakes and shutdowns."""
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(self.protocol, sock=each, backlog=BACKLOG, **self._options)
            for each in sockets or []
        ]
        self.started = True

    def protocol(self) -> BoundedProtocol:
        """Build the protocol of one connection."""
        state = {UPLOADS: self._uploads}
        return BoundedProtocol(self._places, self.config, self.server_state, state)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield

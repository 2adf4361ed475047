"""uvicorn inside the gateway's event loop."""

import asyncio
import errno
import socket
from collections.abc import Generator
from contextlib import contextmanager
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
from omnirelay.errors import AddressInUseError, ConfigError

FAREWELL_S: Final = 1
"""How long a closing server tries to deliver the last events; a whole number, as uvicorn wants it."""


def api_server(address: str, context: HttpContext) -> "HttpServer":
    """Give what serves clients; the arguments are those of :func:`monitor_server`."""
    access = context.access
    server = BoundedServer(make_app(context), access.http_places, context.uploads, access.server_options)
    return HttpServer("gateway.http", address, server)


def monitor_server(address: str, context: HttpContext) -> "HttpServer":
    """Give what serves health checks and metrics, which no client can keep busy.

    Args:
        address: Where to listen, ``tcp://HOST:PORT``.
        context: The gateway's parts.
    """
    places = WatchersPlaces(MAX_WATCHERS, context.access.proxies)
    return HttpServer(
        "gateway.monitor",
        address,
        BoundedServer(make_monitor_app(address, context), places, context.uploads, {}),
        reserved=0,
    )


class HttpServer:
    """Serves an application.

    Args:
        key: The configuration's, of the address.
        address: Where to listen, ``tcp://HOST:PORT``.
        server: Serves it.
        reserved: File descriptors that its connections may not use.
    """

    def __init__(
        self, key: str, address: str, server: "BoundedServer", reserved: int = RESERVED_FILES
    ) -> None:
        self._reserved = reserved
        self._key = key
        self._address = address
        self._server = server
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            AddressInUseError: Another process listens there.
            ConfigError: The address cannot be used at all.
        """
        sockets = await self._listen()
        self._serving = asyncio.create_task(self._server.serve(sockets))

    @property
    def answering(self) -> bool:
        """An answer is not complete; sessions of WebSockets do not count."""
        connections = self._server.server_state.connections
        return any(isinstance(each, BoundedProtocol) and each.answering for each in connections)

    def stop_listening(self) -> None:
        """Take no more clients; those that are there stay."""
        for each in self._server.servers:
            each.close()

    async def close(self) -> None:
        """Take no more requests, deliver what is on its way for :data:`FAREWELL_S`, and hang up.

        Close the gateway first: it ends the requests.
        """
        if self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        self._server.hang_up()

    async def _listen(self) -> list[socket.socket]:
        try:
            return await listen(self._address, self._reserved)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(
                    f"{self._address} is in use: does another program serve HTTP there? "
                    f"Stop it, or set another {self._key} in the configuration."
                ) from error
            raise ConfigError(f"cannot listen on {self._address} ({self._key}): {error}") from error


class BoundedServer(uvicorn.Server):
    """uvicorn, which here is a part of a process and not the process.

    Args:
        app: Answers the requests.
        places: For connections.
        uploads: Memory for long messages of WebSockets.
        options: Of TLS.
    """

    def __init__(self, app: ASGIApp, places: Places, uploads: UploadRoom, options: TlsOptions) -> None:
        self._options = options
        self._places = places
        self._uploads = uploads
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

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as uvicorn does, but with bounds on how TLS begins and ends."""
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(self.protocol, sock=each, backlog=BACKLOG, **self._options)
            for each in sockets or []
        ]
        self.started = True

    def protocol(self) -> BoundedProtocol:
        """Give what serves one connection."""
        state = {UPLOADS: self._uploads}
        return BoundedProtocol(
            self._places, config=self.config, server_state=self.server_state, app_state=state
        )

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield

    def hang_up(self) -> None:
        """Close what clients have left open."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

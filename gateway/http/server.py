"""uvicorn inside the gateway's event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from socket import socket

from starlette.types import ASGIApp

from gateway.access.access import TlsOptions
from gateway.access.listening import RESERVED_FILES, listen
from gateway.fairness.uploads import UploadRoom
from gateway.http.app import make_app, make_monitor_app
from gateway.http.context import HttpContext
from gateway.http.errors import malformed
from gateway.http.websocket import MAX_MESSAGE_BYTES, UPLOADS, BoundedWebSocket
from shared.http.protocol import BoundedProtocol, Places
from shared.http.server import BoundedServer, WatchersPlaces


def api_server(address: str, context: HttpContext) -> "HttpServer":
    """Build the server for clients at ``tcp://HOST:PORT``."""
    access = context.access
    app, options = make_app(context), access.server_options
    listening = partial(listen, address, "gateway.http", RESERVED_FILES)
    return HttpServer(app, access.http_places, context.uploads, options, listening)


def monitor_server(address: str, context: HttpContext) -> "HttpServer":
    """Build the server for health checks and metrics, which clients cannot block."""
    app, places = make_monitor_app(address, context), WatchersPlaces()
    listening = partial(listen, address, "gateway.monitor", reserved=0)
    return HttpServer(app, places, context.uploads, {}, listening)


class HttpServer(BoundedServer):
    """uvicorn as a part of the gateway.

    Attributes:
        serving: Runs until it is closed; None before :meth:`start`.

    Args:
        app: The application.
        places: Bounds the connections.
        uploads: Memory for large WebSocket messages.
        options: TLS.
        listening: Makes its sockets, as :func:`gateway.access.listening.listen`.
    """

    def __init__(
        self,
        app: ASGIApp,
        places: Places,
        uploads: UploadRoom,
        options: TlsOptions,
        listening: Callable[[], Awaitable[list[socket]]],
    ) -> None:
        self._listening = listening
        self.serving: asyncio.Task[None] | None = None
        super().__init__(
            app,
            places,
            malformed,
            tls=options,
            state={UPLOADS: uploads},
            ws=BoundedWebSocket,
            ws_max_size=MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
        )

    async def start(self) -> None:
        """Listen; errors are those of :func:`gateway.access.listening.listen`."""
        self.serving = asyncio.create_task(self.serve(await self._listening()))

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
        """Stop, and close connections after one second; the gateway must be closed first."""
        if self.serving is None:
            return
        self.should_exit = True
        # Its error, if it has one, is not raised here: the process has seen it.
        await asyncio.wait([self.serving])
        self.abort()

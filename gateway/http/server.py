"""uvicorn inside the gateway's event loop."""

import asyncio
import errno
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from gateway.door import TlsOptions
from gateway.http.app import make_app
from gateway.http.context import HttpContext
from gateway.http.protocol import KEEP_ALIVE_S, MAX_HEAD_BYTES, BoundedProtocol
from gateway.http.realtime.protocol import MAX_MESSAGE_BYTES, BoundedWebSocket
from gateway.listening import BACKLOG, listen
from shared.errors import AddressInUseError, ConfigError

FAREWELL_S: Final = 1
"""How long a closing server tries to deliver the last events; a whole number, as uvicorn wants it."""


class HttpServer:
    """Serves the application.

    Args:
        address: Where to listen, ``tcp://HOST:PORT``.
        context: The gateway's parts.
    """

    def __init__(self, address: str, context: HttpContext) -> None:
        self._address = address
        self._context = context
        self._server = _Server(make_app(context), context.door.server_options)
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
        self._context.audio.close()

    async def _listen(self) -> list[socket.socket]:
        try:
            return await listen(self._address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(
                    f"{self._address} is in use: does another program serve HTTP there? "
                    "Stop it, or set another gateway.http in the configuration."
                ) from error
            raise ConfigError(f"cannot listen on {self._address} (gateway.http): {error}") from error


class _Server(uvicorn.Server):
    """uvicorn, which here is a part of a process and not the process."""

    def __init__(self, app: ASGIApp, options: TlsOptions) -> None:
        self._options = options
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
        state = self.lifespan.state

        def protocol() -> BoundedProtocol:
            return BoundedProtocol(config=self.config, server_state=self.server_state, app_state=state)

        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(protocol, sock=each, backlog=BACKLOG, **self._options)
            for each in sockets or []
        ]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the process."""
        yield

    def hang_up(self) -> None:
        """Close what clients have left open."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

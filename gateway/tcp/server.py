"""The TCP server: accepts connections and closes them in order."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from gateway.access.access import Access
from gateway.access.listening import listen
from gateway.fairness.thread import FairThread
from gateway.fairness.uploads import UploadRoom
from gateway.manager import Gateway
from gateway.tcp.connection import FAREWELL_S, Connection
from omnirelay.status import StatusReport
from shared.config import Config
from shared.http import BACKLOG
from shared.log import limited

log = logging.getLogger(__name__)


@dataclass(eq=False)
class TcpServer:
    """Serves each TCP client on a connection of its own."""

    _gateway: Gateway
    _config: Config
    _status: Callable[[], StatusReport]
    _uploads: UploadRoom
    _access: Access
    _parsing: FairThread
    refused: Counter[str] = field(default_factory=Counter)
    _servers: list[asyncio.Server] = field(default_factory=list)
    _connections: dict[asyncio.Task[None], Connection] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    async def start(self) -> None:
        """Listen; AddressInUseError or ConfigError if that is not possible."""
        self._servers = [
            await asyncio.start_server(self._serve, sock=each, backlog=BACKLOG, **self._access.server_options)
            for each in await listen(self._config.gateway.listen, "gateway.listen")
        ]

    def stop_listening(self) -> None:
        """Accept no more connections."""
        for each in self._servers:
            each.close()

    async def close(self) -> None:
        """Flush answers for :data:`FAREWELL_S`, then close all connections, after the gateway is closed."""
        if not self._servers:
            return
        self.stop_listening()
        connections = dict(self._connections)
        farewells = [asyncio.create_task(each.answered()) for each in connections.values()]
        if farewells:
            await asyncio.wait(farewells, timeout=FAREWELL_S)
        # Their tasks end with the transport; asyncio.streams of Python 3.11 reports cancelled ones as failed.
        for each in connections.values():
            each.hang_up(abort=False)
        if connections:
            await asyncio.wait(connections, timeout=FAREWELL_S)
        for each in connections.values():
            each.hang_up(abort=True)
        await asyncio.gather(*farewells, *connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or not any(each.is_serving() for each in self._servers):
            writer.close()
            return
        address, *_ = writer.get_extra_info("peername") or ("unknown",)
        place = self._access.tcp_places.take(address, writer.transport.abort)
        if place is None:
            limited(log).warning("closed a connection: its address holds too many")
            writer.transport.abort()
            return
        name = f"client {next(self._numbers)}"
        given = self._access, self._uploads, self._status, self.refused, self._parsing
        connection = Connection(self._gateway, reader, writer, name, *given)
        self._connections[task] = connection
        connection.known = place.move
        place.idle = lambda: connection.idle
        try:
            await connection.serve()
        finally:
            del self._connections[task]
            writer.close()
            try:
                await _closed(writer)
            finally:
                place.leave()


async def _closed(writer: asyncio.StreamWriter) -> None:
    """Wait until the last messages are sent, or abort: to a client that reads nothing they never are."""
    try:
        async with asyncio.timeout(FAREWELL_S):
            await writer.wait_closed()
    except OSError as error:
        log.debug("a connection did not close in order: %r", error)
        writer.transport.abort()

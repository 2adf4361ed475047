"""``/metrics``, ``/livez`` and ``/readyz`` of a stage over HTTP, on its own thread."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from typing import Final, Self

from prometheus_client import REGISTRY, CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from omnirelay.errors import ConfigError
from shared.exposition import metrics_response
from shared.http.server import BoundedServer, WatchersPlaces
from shared.transport.sockets import address_in_use

Check = Callable[[], str | None]
"""Returns what is wrong, or None."""


class HttpEndpoint:
    """Listens from creation to :meth:`close`.

    Args:
        address: ``tcp://HOST:PORT``; the host ``*`` is every interface.

    Raises:
        AddressInUseError: Another process listens there.
        ConfigError: The address cannot be used.
    """

    def __init__(
        self, address: str, live: Check, ready: Check, registry: CollectorRegistry = REGISTRY
    ) -> None:
        async def metrics(request: Request) -> Response:
            return metrics_response(request, registry)

        async def livez(_: Request) -> Response:
            return _verdict(live())

        async def readyz(_: Request) -> Response:
            return _verdict(ready())

        listener = _listen(address)
        self.places: Final = WatchersPlaces()
        app = Starlette(routes=[Route(f"/{each.__name__}", each) for each in (metrics, livez, readyz)])
        app.router.redirect_slashes = False
        self._server = BoundedServer(app, self.places, _malformed, ws="none")
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener)), name="http", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and drop every connection; idempotent."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    async def _serve(self, listener: socket.socket) -> None:
        await self._server.serve([listener])
        self._server.abort()
        # Aborted connections are closed in the loop's next iteration.
        await asyncio.sleep(0)


def _verdict(reason: str | None) -> Response:
    if reason is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": reason}, 503)


def _malformed(problem: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    body = problem.encode()
    length = str(len(body)).encode()
    return [(b"content-type", b"text/plain"), (b"content-length", length), (b"connection", b"close")], body


def _listen(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = "" if host == "*" else host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise address_in_use(address) from error
        raise ConfigError(f"cannot listen on {address}: {error}") from error

"""A stage's health, and ``/metrics``, ``/livez`` and ``/readyz`` over HTTP, on a thread of its own."""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, Self

from prometheus_client import REGISTRY, CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from omnirelay.errors import ConfigError
from shared.exposition import metrics_response
from shared.http.server import BoundedServer, WatchersPlaces
from shared.stage.loop import StageLoop
from shared.transport.sockets import address_in_use


class StageHealth:
    """The state of a stage's loop, from loading to its end.

    Args:
        step_timeout_s: A loop that has been in one step for longer counts as hung.
    """

    def __init__(self, step_timeout_s: float) -> None:
        self._step_timeout_s = step_timeout_s
        self._loop: StageLoop[Any] | None = None
        self._ended = False

    def loaded(self, loop: StageLoop[Any]) -> None:
        """The engine is loaded; what the loop reports is there."""
        self._loop = loop

    def ended(self) -> None:
        """The loop has ended."""
        self._ended = True

    def why_not_live(self) -> str | None:
        """Why the process is not live; None while it loads and while its loop runs."""
        if self._ended:
            return "the stage's loop has ended"
        report = self._loop.report if self._loop is not None else None
        if report is not None and report.busy_s > self._step_timeout_s:
            return (
                f"the stage's loop has been in one step for {report.busy_s:.0f} s, "
                f"longer than gateway.step_timeout_s ({self._step_timeout_s:g} s)"
            )
        return None

    def why_not_ready(self) -> str | None:
        """Why the stage takes no requests now; None if it does."""
        if self._loop is None:
            return "the model is being loaded"
        if self._loop.report is None:
            return "the stage's loop has not begun"
        if self._loop.report.draining:
            return "the stage was told to stop"
        return self.why_not_live()


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
        self._server = BoundedServer(
            app, self.places, lambda problem: ("text/plain", problem.encode()), ws="none"
        )
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

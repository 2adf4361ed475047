"""Middleware of the HTTP servers: the access log, and checks that can refuse a request."""

import logging
import time
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import response_of
from omnirelay.errors import OmniRelayError
from shared.log import limited

log = logging.getLogger(__name__)
POLLED: Final = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Paths that are polled, and logged at ``debug`` only."""
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class AccessLog:
    """Logs method, path, status and duration of every request and WebSocket, and nothing else of a client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it."""
        began = time.monotonic()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] in {"http.response.start", "websocket.http.response.start"}:
                status = message["status"]
            elif message["type"] == "websocket.accept":
                status = HTTPStatus.SWITCHING_PROTOCOLS
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            took = time.monotonic() - began
            level = logging.DEBUG if scope["path"] in POLLED else logging.INFO
            asked = scope.get("method", "GET")
            method = asked if asked in METHODS else "another method"
            path = _known_path(scope)
            # Anybody can cause other lines without limit: no key is needed, or the request is refused.
            served = path.startswith("/v1/") and HTTPStatus.OK <= status < HTTPStatus.BAD_REQUEST
            write = log.log if served else partial(limited(log).log, extra={"limited": f"{path} {status}"})
            write(level, "%s %r %s %.3f s", method, path, status or "-", took)


class Guard:
    """Passes a request on unless ``check`` raises an error, which is counted by ``told`` and answered."""

    def __init__(
        self, app: ASGIApp, check: Callable[[Scope], None], told: Callable[[OmniRelayError], None]
    ) -> None:
        self._app = app
        self._check = check
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request."""
        try:
            self._check(scope)
        except OmniRelayError as error:
            self._told(error)
            await response_of(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _known_path(scope: Scope) -> str:
    """Return the path of a route, without its parameters."""
    path: str = scope["path"]
    if "endpoint" not in scope:
        return "another path"
    for name, value in scope.get("path_params", {}).items():
        path = path.removesuffix(str(value)) + f"{{{name}}}"
    return path

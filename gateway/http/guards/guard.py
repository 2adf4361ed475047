"""Middleware of the HTTP servers: plain paths, the access log, and checks that can refuse a request."""

import logging
import re
import secrets
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import response_of
from omnirelay.errors import OmniRelayError
from shared.log import limited, of_request

log = logging.getLogger(__name__)
POLLED: Final = frozenset({"/livez", "/readyz", "/health", "/version", "/metrics"})
"""Paths that are polled, and logged at ``debug`` only."""
OWN_ID: Final = re.compile(r"[\w.:-]{1,128}", re.ASCII)
REQUEST_ID: Final = "omnirelay.request_id"
"""Key of a request's scope that holds its id, which the log names."""
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class AccessLog:
    """Logs method, path, status, duration and id of every request and WebSocket, and nothing of a client.

    Every response has the id in ``X-Request-Id``: that of the gateway's request if there is one.  A client's
    own id, if it sent a valid one, comes back in ``X-Client-Request-Id``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it."""
        began = time.monotonic()
        status = 0
        scope[REQUEST_ID] = f"http_{secrets.token_hex(12)}"
        own = _own_id(scope)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] in {"http.response.start", "websocket.http.response.start"}:
                status = message["status"]
                headers = MutableHeaders(scope=message)
                scope[REQUEST_ID] = headers.setdefault("X-Request-Id", scope[REQUEST_ID])
                if own is not None:
                    headers["X-Client-Request-Id"] = own
            elif message["type"] == "websocket.accept":
                status = HTTPStatus.SWITCHING_PROTOCOLS
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            took = time.monotonic() - began
            level = logging.WARNING if status >= HTTPStatus.INTERNAL_SERVER_ERROR else logging.INFO
            if scope["path"] in POLLED:
                level = logging.DEBUG
            asked = scope.get("method", "GET")
            method = asked if asked in METHODS else "another method"
            path = _known_path(scope)
            # Anybody can cause other lines without limit: no key is needed, or the request is refused.
            served = path.startswith("/v1/") and HTTPStatus.OK <= status < HTTPStatus.BAD_REQUEST
            about = of_request(scope[REQUEST_ID])
            kind = {} if served else {"limited": f"{path} {status}"}
            write = log.log if served else limited(log).log
            name = scope[REQUEST_ID]
            write(level, "%s %r %s %.3f s %s", method, path, status or "-", took, name, extra=about | kind)


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
    """Return the path of a route, with the names of its parameters in place of their values."""
    if "endpoint" not in scope:
        return "another path"
    path: str = scope["path"]
    # Backwards: the value of a parameter may also occur before it.
    for name, value in reversed(scope.get("path_params", {}).items()):
        before, _, after = path.rpartition(f"/{value}")
        path = f"{before}/{{{name}}}{after}"
    return path


def _own_id(scope: Scope) -> str | None:
    """Return the id that the client gave its request, if it is short and plain."""
    headers = Headers(scope=scope)
    own = headers.get("x-client-request-id") or headers.get("x-request-id") or ""
    return own if OWN_ID.fullmatch(own) else None


_SLASHES: Final = re.compile("//+")


class PlainPaths:
    """Reads ``//v1/models/`` as ``/v1/models``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] in ("http", "websocket"):
            path = _SLASHES.sub("/", scope["path"])
            scope["path"] = path.rstrip("/") or "/"
        await self._app(scope, receive, send)

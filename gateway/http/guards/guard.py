"""What every HTTP request passes: the log, and the check of where a browser's requests come from."""

import logging
import re
import time
from collections.abc import Callable, Collection
from functools import partial
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import response_of
from omnirelay.errors import OmniRelayError, OriginError
from shared.log import limited

log = logging.getLogger(__name__)
POLLED: Final = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Paths that are asked for again and again, and would fill the log."""
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
# What no name server can change the meaning of.
_FIXED_HOST: Final = re.compile(r"https?://(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


class AccessLog:
    """Writes a line for every request: what was asked, the status, and the time until the answer's end.

    Neither queries nor bodies are written, nor anything else that a client makes up.

    Args:
        app: Answers the requests.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
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
            path = _known(scope)
            # What needs no key, and what was refused, can be asked for without a bound.
            served = path.startswith("/v1/") and 0 < status < HTTPStatus.BAD_REQUEST
            write = log.log if served else partial(limited(log).log, extra={"limited": f"{path} {status}"})
            write(level, "%s %r %s %.3f s", method, path, status or "-", took)


class OriginGuard:
    """Refuses what browsers send for pages of other origins.

    A page's own origin is believed only where its host is an address or ``localhost``: a name may be made to
    stand for this machine by anyone.  Other origins have to be configured.

    Args:
        app: Answers the requests.
        allowed: The origins of the configuration.
        told: Told about each refusal.
    """

    def __init__(
        self, app: ASGIApp, allowed: Collection[str], told: Callable[[OmniRelayError], None]
    ) -> None:
        self._app = app
        self._allowed = frozenset(allowed)
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        if origin is None or origin in self._allowed or _is_own(origin, headers.get("host", "")):
            await self._app(scope, receive, send)
            return
        error = OriginError(f"pages of {origin[:128]!r} may not use this gateway (gateway.http_origins)")
        self._told(error)
        await response_of(error)(scope, receive, send)


def _known(scope: Scope) -> str:
    """The path, as far as it is one of this server's."""
    path: str = scope["path"]
    if "endpoint" not in scope:
        return "another path"
    for name, value in scope.get("path_params", {}).items():
        path = path.removesuffix(str(value)) + f"{{{name}}}"
    return path


def _is_own(origin: str, host: str) -> bool:
    return origin.partition("://")[2] == host and _FIXED_HOST.fullmatch(origin) is not None

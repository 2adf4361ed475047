"""Paths as clients join them: from a base URL with or without a slash at its end."""

import re
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

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

"""The page at ``/``, which loads nothing from elsewhere."""

import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import PurePath
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; media-src blob:; "
    "connect-src {connect}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), geolocation=(), microphone=(self)",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class PageApi:
    """The endpoints; the files are read once.

    Args:
        gateways: Origins of all gateways, of which the page may use any; none if there is one.
    """

    def __init__(self, gateways: Sequence[str]) -> None:
        sockets = [origin.replace("http", "ws", 1) for origin in gateways]
        policy = POLICY.format(connect=" ".join(["'self'", *gateways, *sockets]))
        self._headers = HEADERS | {"Content-Security-Policy": policy}
        static = files(__name__) / "static"
        self._files = {
            each.name: each.read_bytes()
            for folder in (static, static / "vendor")
            for each in folder.iterdir()
            if PurePath(each.name).suffix in TYPES
        }
        self._files["gateways.json"] = json.dumps(gateways).encode()

    async def index(self, request: Request) -> Response:
        """Answer the page."""
        return self._answer(request, "index.html")

    async def file(self, request: Request) -> Response:
        """Answer a file of the page.

        Raises:
            HTTPException: 404.
        """
        return self._answer(request, request.path_params["name"])

    def html(self, body: str) -> Response:
        """Answer a page that is not a file."""
        return Response(body, headers={**self._headers, "Content-Type": TYPES[".html"]})

    def _answer(self, request: Request, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404)
        body = self._files[name]
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        headers = {**self._headers, "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers={**headers, "Content-Type": TYPES[PurePath(name).suffix]})

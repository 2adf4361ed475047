"""The check of API keys."""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.access.access import Access
from gateway.access.clients import Principal
from gateway.access.places import Place

OPEN_PATHS: Final = frozenset({"/", "/livez", "/readyz", "/health"})
"""Paths that need no key, besides the page's files."""
OPEN_FOLDER: Final = "/page/"
SUBPROTOCOL_KEY: Final = "openai-insecure-api-key."
"""Prefix of a WebSocket subprotocol that carries a key: browsers cannot set headers of a WebSocket."""
CLIENT: Final = "omnirelay.client"
"""Key of a request's scope that holds its client."""
PLACE: Final = "place"
"""Key of a connection's state that holds its place."""


def check_key(access: Access, scope: Scope) -> None:
    """Authenticate the client of a request, before the body is read.

    Raises:
        UnauthenticatedError: A key is needed, and is missing or invalid.
    """
    path = scope["path"]
    if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
        return
    host, port = scope.get("client") or ("unknown", 0)
    # Without keys a client is its address; a WebSocket, which is long-lived, is one of its own.
    peer = f"{host}:{port}" if scope["type"] == "websocket" else host
    client = scope[CLIENT] = access.client(_key(scope), peer)
    move(scope, access.share(client, host))


def client_of(scope: Scope) -> Principal:
    """Return the client of a request that passed the check."""
    client: Principal = scope[CLIENT]
    return client


def move(scope: Scope, holder: str) -> bool:
    """Count a request's connection for another holder; see :meth:`gateway.access.places.Place.move`."""
    place: Place | None = scope.get("state", {}).get(PLACE)
    return place is None or place.move(holder)


def _key(scope: Scope) -> str | None:
    """Return the key of a request; none if it has several."""
    scheme, _, key = _only(Headers(scope=scope).getlist("authorization")).partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    if scope["type"] == "websocket":
        offered = [each for each in scope["subprotocols"] if each.startswith(SUBPROTOCOL_KEY)]
        return _only(offered).removeprefix(SUBPROTOCOL_KEY)
    return None


def _only(values: list[str]) -> str:
    return values[0] if len(values) == 1 else ""

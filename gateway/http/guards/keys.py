"""Who sends a request: the check of API keys, and of what trusted proxies say."""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.access.access import Access
from gateway.access.account import NO_KEY, Principal
from gateway.access.api_keys import EPHEMERAL_PREFIX, EphemeralKey
from gateway.access.places import Place, Proxies, holder_of
from omnirelay.errors import BusyError, UnauthenticatedError
from shared.http.protocol import PLACE

OPEN_PATHS: Final = frozenset({"/", "/docs", "/health", "/livez", "/openapi.json", "/readyz", "/version"})
"""Paths that need no key, besides the page's files."""
OPEN_FOLDER: Final = "/page/"
SUBPROTOCOL_KEY: Final = "openai-insecure-api-key."
"""Prefix of a WebSocket subprotocol that carries a key: browsers cannot set headers of a WebSocket."""
CLIENT: Final = "omnirelay.client"
"""Key of a request's scope that holds its client."""
EPHEMERAL: Final = "omnirelay.ephemeral"
"""Key of a request's scope that holds what its ephemeral key stands for."""
REALTIME: Final = "/v1/realtime"
CALLS: Final = "/v1/realtime/calls"


def check_key(access: Access, scope: Scope) -> None:
    """Authenticate the client of a request, before the body is read.

    Raises:
        UnauthenticatedError: A key is needed, and is missing or invalid.
        BusyError: It has too many connections.
    """
    if is_open(scope["path"]):
        return
    host, port = scope.get("client") or ("unknown", 0)
    # Without keys a client is its address; a WebSocket, which is long-lived, is one of its own.
    peer = f"{host}:{port}" if scope["type"] == "websocket" else host
    key = _key(scope)
    if key is not None and key.startswith(EPHEMERAL_PREFIX):
        client = _client_of_ephemeral(access, key, peer, scope)
    else:
        client = access.client(key, peer)
    scope[CLIENT] = client
    move(scope, access.share(client, host))


def is_open(path: str) -> bool:
    """Whether a path needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def client_of(scope: Scope) -> Principal:
    """Return the client of a request that passed the check."""
    client: Principal = scope[CLIENT]
    return client


def ephemeral_of(scope: Scope) -> EphemeralKey | None:
    """Return what the ephemeral key of a request stands for; none if it has no such key."""
    key: EphemeralKey | None = scope.get(EPHEMERAL)
    return key


RETRY_MS: Final = 1000


def move(scope: Scope, holder: str) -> None:
    """Count a request's connection for another holder, or raise BusyError."""
    place: Place | None = scope.get("state", {}).get(PLACE)
    if place is not None and not place.move(holder):
        raise BusyError("too many connections of this key or address are open", RETRY_MS)


def _client_of_ephemeral(access: Access, value: str, peer: str, scope: Scope) -> Principal:
    """Return the client of a request with an ephemeral key: the key's maker, where keys are needed."""
    key = access.ephemeral.find(value)
    if access.keys.needed and not key.maker.known:
        raise UnauthenticatedError(NO_KEY)
    path = scope["path"]
    if path not in (REALTIME, CALLS) and not path.startswith(f"{CALLS}/"):
        raise UnauthenticatedError(f"an ephemeral key opens {REALTIME} and {CALLS} only")
    scope[EPHEMERAL] = key
    return key.maker if access.keys.needed else Principal(peer)


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


def check_forwarded(proxies: Proxies, scope: Scope) -> None:
    """Take the client's address from ``X-Forwarded-For`` if a trusted proxy sent the request.

    Raises:
        BusyError: That address has too many connections.
    """
    peer, port = scope.get("client") or ("", 0)
    if peer not in proxies:
        return
    address = proxies.client(Headers(scope=scope).getlist("x-forwarded-for"))
    if address is not None:
        scope["client"] = (address, port)
        move(scope, holder_of(address))

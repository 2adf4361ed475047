"""The check of who asks: requests bring an API key, where one is needed."""

from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.access import Access
from gateway.access.clients import Principal
from gateway.access.places import Place
from gateway.http.errors import response_of
from omnirelay.errors import OmniRelayError, UnauthenticatedError

OPEN_PATHS: Final = frozenset({"/", "/livez", "/readyz", "/health"})
"""What anybody may ask for; and the files of the page."""
OPEN_FOLDER: Final = "/page/"
SUBPROTOCOL_KEY: Final = "openai-insecure-api-key."
"""How browsers, which cannot set headers of a WebSocket, send a key: OpenAI's clients offer a subprotocol."""
CLIENT: Final = "omnirelay.client"
"""Where the client is found in the scope of a request."""
PLACE: Final = "place"
"""Where the place of its connection is found in the state of a request."""


class KeyGuard:
    """Refuses requests without a key that is known, where one is needed, before anything of them is read.

    Args:
        app: Answers the requests.
        access: Says who comes.
        told: Told about each refusal.
    """

    def __init__(self, app: ASGIApp, access: Access, told: Callable[[OmniRelayError], None]) -> None:
        self._app = app
        self._access = access
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with its client, or refuse it."""
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            await self._app(scope, receive, send)
            return
        try:
            client = scope[CLIENT] = self._access.client(_key(scope), _peer(scope))
        except UnauthenticatedError as error:
            self._told(error)
            await response_of(error)(scope, receive, send)
            return
        move(scope, self._access.share(client, _address(scope)))
        await self._app(scope, receive, send)


def client_of(scope: Scope) -> Principal:
    """Give the client of a request that has passed."""
    client: Principal = scope[CLIENT]
    return client


def move(scope: Scope, holder: str) -> bool:
    """Note whose the connection of a request is; see :meth:`gateway.access.places.Place.move`."""
    place: Place | None = scope.get("state", {}).get(PLACE)
    return place is None or place.move(holder)


def _key(scope: Scope) -> str | None:
    """The key that a request brings; two are as good as none."""
    scheme, _, key = _only(Headers(scope=scope).getlist("authorization")).partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    if scope["type"] == "websocket":
        offered = [each for each in scope["subprotocols"] if each.startswith(SUBPROTOCOL_KEY)]
        return _only(offered).removeprefix(SUBPROTOCOL_KEY)
    return None


def _only(values: list[str]) -> str:
    return values[0] if len(values) == 1 else ""


def _peer(scope: Scope) -> str:
    """What a client goes by without keys: its address; a WebSocket, which stays, goes by its port too."""
    host, port = scope.get("client") or ("unknown", 0)
    return f"{host}:{port}" if scope["type"] == "websocket" else host


def _address(scope: Scope) -> str:
    host, _ = scope.get("client") or ("unknown", 0)
    return str(host)

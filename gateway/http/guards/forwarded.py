"""Requests that come through a proxy: whose they are, and whether that one has connections to spare."""

from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.places import Proxies, holder_of
from gateway.http.errors import response_of
from gateway.http.guards.keys import move
from omnirelay.errors import BusyError, OmniRelayError

RETRY_MS: Final = 1000


class ForwardedGuard:
    """Lets a request of a trusted proxy count as that of the address for which the proxy asks.

    Args:
        app: Answers the requests.
        proxies: The trusted ones.
        told: Told about each refusal.
    """

    def __init__(self, app: ASGIApp, proxies: Proxies, told: Callable[[OmniRelayError], None]) -> None:
        self._app = app
        self._proxies = proxies
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        peer, port = scope.get("client") or ("", 0)
        address = None
        if peer in self._proxies:
            address = self._proxies.client(Headers(scope=scope).getlist("x-forwarded-for"))
        if address is not None:
            scope["client"] = (address, port)
            if not move(scope, holder_of(address)):
                error = BusyError("this address has as many connections open as it may", RETRY_MS)
                self._told(error)
                await response_of(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

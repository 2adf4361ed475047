"""Requests that come through a trusted proxy."""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.access.places import Proxies, holder_of
from gateway.http.guards.keys import move
from omnirelay.errors import BusyError

RETRY_MS: Final = 1000


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
        if not move(scope, holder_of(address)):
            raise BusyError("too many connections of this address are open", RETRY_MS)

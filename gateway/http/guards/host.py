"""The check of which host a browser believes to speak to."""

import ipaddress
from collections.abc import Callable, Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.http.errors import response_of
from omnirelay.errors import OmniRelayError, OriginError
from omnirelay.protocol import parse_tcp
from shared.config import GatewayConfig

LOCAL_NAMES: Final = frozenset({"localhost", "localhost."})


class HostGuard:
    """Refuses requests whose ``Host`` is neither this machine nor one of those that are allowed.

    A page of elsewhere can make its own name stand for this machine (DNS rebinding); its requests would count
    as those of the gateway's own page, but their ``Host`` gives them away.

    Args:
        app: Answers the requests.
        allowed: Hosts besides this machine, without port and brackets.
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
        host = Headers(scope=scope).get("host")
        # Only programs come without one, and they may say what they like anyway.
        if host is None or is_local(_name(host)) or _name(host) in self._allowed:
            await self._app(scope, receive, send)
            return
        error = OriginError(
            f"this gateway does not answer for {host[:128]!r}: "
            "ask for localhost, or name the host in gateway.http_hosts"
        )
        self._told(error)
        await response_of(error)(scope, receive, send)


def allowed_hosts(gateway: GatewayConfig) -> frozenset[str] | None:
    """The hosts besides this machine that requests may name; none if they may name any."""
    hosts = gateway.http_hosts
    if hosts is None and gateway.http is not None and not is_local(parse_tcp(gateway.http)[0]):
        return None
    return frozenset(hosts or ()) | {_name(origin.partition("://")[2]) for origin in gateway.http_origins}


def is_local(name: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    if name in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """The host without its port and brackets, in lower case."""
    bare = host.lower()
    if bare.startswith("["):
        return bare[1:].partition("]")[0]
    return bare.partition(":")[0]

"""Checks against pages of other origins and against DNS rebinding."""

import ipaddress
import re
from collections.abc import Collection
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.access.places import without_port
from omnirelay.errors import OriginError
from omnirelay.protocol import parse_tcp
from shared.config import GatewayConfig

LOCAL_NAMES: Final = frozenset({"localhost", "localhost."})
# Hosts that no name server can redirect.
_FIXED_HOST: Final = re.compile(r"https?://(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]+)?")


def check_origin(allowed: Collection[str], scope: Scope) -> None:
    """Refuse what browsers send for pages of other origins.

    The gateway's own origin is accepted only with an address or ``localhost`` as its host: anybody can make a
    name resolve to this machine.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is None or origin in allowed or _is_own(origin, headers.get("host", "")):
        return
    raise OriginError(f"pages of {origin[:128]!r} may not use this gateway (gateway.http_origins)")


def check_host(allowed: Collection[str], scope: Scope) -> None:
    """Refuse a ``Host`` that is neither this machine nor allowed.

    By DNS rebinding a foreign page can make its own name resolve to this machine; its requests would pass as
    same-origin, but still carry that name.
    """
    host = Headers(scope=scope).get("host")
    # Browsers always send one; other programs can send any.
    if host is None or is_local(name := without_port(host.lower())) or name in allowed:
        return
    raise OriginError(
        f"this gateway does not answer for {host[:128]!r}: "
        "ask for localhost, or name the host in gateway.http_hosts"
    )


def allowed_hosts(gateway: GatewayConfig) -> frozenset[str] | None:
    """Return the hosts besides this machine that requests may name; none if any."""
    hosts = gateway.http_hosts
    if hosts is None and gateway.http is not None and not is_local(parse_tcp(gateway.http)[0]):
        return None
    origins = [*gateway.http_origins, *gateway.page_origins]
    return frozenset(hosts or ()) | {without_port(origin.lower().partition("://")[2]) for origin in origins}


def is_local(name: str) -> bool:
    """Whether a host is this machine's loopback."""
    if name in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_own(origin: str, host: str) -> bool:
    return origin.partition("://")[2] == host and _FIXED_HOST.fullmatch(origin) is not None

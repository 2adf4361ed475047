"""Middleware of the HTTP servers: plain paths, the access log, checks of keys, proxies, hosts and origins."""

import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.access.access import Access
from gateway.access.account import NO_KEY, Principal
from gateway.access.api_keys import EPHEMERAL_PREFIX, EphemeralKey
from gateway.access.places import Place, Proxies, holder_of, without_port
from gateway.http.errors import response_of
from omnirelay.errors import BusyError, OmniRelayError, OriginError, UnauthenticatedError
from omnirelay.protocol import parse_tcp
from shared.config import GatewayConfig
from shared.http.protocol import PLACE
from shared.log import limited, of_request

log = logging.getLogger(__name__)
POLLED: Final = frozenset({"/livez", "/readyz", "/health", "/version", "/metrics"})
"""Paths that are polled, and logged at ``debug`` only."""
OWN_ID: Final = re.compile(r"[\w.:-]{1,128}", re.ASCII)
REQUEST_ID: Final = "omnirelay.request_id"
"""Key of a request's scope that holds its id, which the log names."""
METHODS: Final = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class AccessLog:
    """Logs method, path, status, duration and id of every request and WebSocket, and nothing of a client.

    Every response has the id in ``X-Request-Id``: that of the gateway's request if there is one.  A client's
    own id, if it sent a valid one, comes back in ``X-Client-Request-Id``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and log it."""
        began = time.monotonic()
        status = 0
        scope[REQUEST_ID] = f"http_{secrets.token_hex(12)}"
        own = _own_id(scope)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] in {"http.response.start", "websocket.http.response.start"}:
                status = message["status"]
                headers = MutableHeaders(scope=message)
                scope[REQUEST_ID] = headers.setdefault("X-Request-Id", scope[REQUEST_ID])
                if own is not None:
                    headers["X-Client-Request-Id"] = own
            elif message["type"] == "websocket.accept":
                status = HTTPStatus.SWITCHING_PROTOCOLS
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            took = time.monotonic() - began
            level = logging.WARNING if status >= HTTPStatus.INTERNAL_SERVER_ERROR else logging.INFO
            if scope["path"] in POLLED:
                level = logging.DEBUG
            asked = scope.get("method", "GET")
            method = asked if asked in METHODS else "another method"
            path = _known_path(scope)
            # Anybody can cause other lines without limit: no key is needed, or the request is refused.
            served = path.startswith("/v1/") and HTTPStatus.OK <= status < HTTPStatus.BAD_REQUEST
            about = of_request(scope[REQUEST_ID])
            kind = {} if served else {"limited": f"{path} {status}"}
            write = log.log if served else limited(log).log
            name = scope[REQUEST_ID]
            write(level, "%s %r %s %.3f s %s", method, path, status or "-", took, name, extra=about | kind)


class Guard:
    """Passes a request on unless ``check`` raises an error, which is counted by ``told`` and answered."""

    def __init__(
        self, app: ASGIApp, check: Callable[[Scope], None], told: Callable[[OmniRelayError], None]
    ) -> None:
        self._app = app
        self._check = check
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request."""
        try:
            self._check(scope)
        except OmniRelayError as error:
            self._told(error)
            await response_of(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _known_path(scope: Scope) -> str:
    """Return the path of a route, with the names of its parameters in place of their values."""
    if "endpoint" not in scope:
        return "another path"
    path: str = scope["path"]
    # Backwards: the value of a parameter may also occur before it.
    for name, value in reversed(scope.get("path_params", {}).items()):
        before, _, after = path.rpartition(f"/{value}")
        path = f"{before}/{{{name}}}{after}"
    return path


def _own_id(scope: Scope) -> str | None:
    """Return the id that the client gave its request, if it is short and plain."""
    headers = Headers(scope=scope)
    own = headers.get("x-client-request-id") or headers.get("x-request-id") or ""
    return own if OWN_ID.fullmatch(own) else None


_SLASHES: Final = re.compile("//+")


class PlainPaths:
    """Reads ``//v1/models/`` as ``/v1/models``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] in ("http", "websocket"):
            scope["path"] = _SLASHES.sub("/", scope["path"]).rstrip("/") or "/"
        await self._app(scope, receive, send)


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

"""The ASGI application: which path leads where, and what all of them have in common."""

from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.errors import http_response, response_of
from gateway.http.guards.forwarded import ForwardedGuard
from gateway.http.guards.guard import AccessLog, OriginGuard
from gateway.http.guards.host import HostGuard, allowed_hosts, is_local
from gateway.http.guards.keys import KeyGuard
from gateway.http.openai.chat import ChatApi
from gateway.http.openai.models import ModelsApi
from gateway.http.openai.speech import SpeechApi
from gateway.http.operations.health import HealthApi
from gateway.http.operations.monitor import MonitorApi
from gateway.http.page import PageApi
from gateway.http.realtime.endpoint import RealtimeApi
from omnirelay.errors import OmniRelayError
from omnirelay.protocol import parse_tcp

CLIENT_GONE: Final = 499
"""nginx's status for it; only the log sees it."""


def make_app(context: HttpContext) -> Starlette:
    """Put the application together.

    Args:
        context: The gateway's parts.
    """
    origins = context.config.gateway.http_origins

    middleware = [Middleware(AccessLog)]
    if context.config.gateway.trusted_proxies:
        middleware.append(Middleware(ForwardedGuard, context.access.proxies, context.told))
    hosts = allowed_hosts(context.config.gateway)
    if hosts is not None:
        middleware.append(Middleware(HostGuard, hosts, context.told))
    middleware.append(Middleware(OriginGuard, origins, context.told))
    if origins:
        exposed = ["X-Request-Id", "Retry-After", "Retry-After-Ms"]
        methods = ["GET", "POST"]
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=origins,
                allow_methods=methods,
                allow_headers=["*"],
                expose_headers=exposed,
            )
        )
    # Behind CORS, so that pages of other origins may ask what they may send, and hear why not.
    middleware.append(Middleware(KeyGuard, context.access, context.told))
    return _app(context, _routes(context), middleware)


def make_monitor_app(address: str, context: HttpContext) -> Starlette:
    """Put together what is served to those who watch the stack.

    Args:
        address: Where it is served.
        context: The gateway's parts.
    """
    middleware = [Middleware(AccessLog)]
    if is_local(parse_tcp(address)[0]):
        middleware.append(Middleware(HostGuard, (), context.told))
    return _app(context, _watched(context), middleware)


def _app(context: HttpContext, routes: list[BaseRoute], middleware: list[Middleware]) -> Starlette:
    async def answer(request: Request, error: Exception) -> Response:
        """Answer with an error that was raised on purpose, or by the router."""
        if isinstance(error, HTTPException):
            return http_response(error, request.scope)
        if isinstance(error, ClientGoneError):
            return Response(status_code=CLIENT_GONE)
        known = error if isinstance(error, OmniRelayError) else OmniRelayError("see the gateway's log")
        context.told(known)
        return response_of(known)

    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            HTTPException: answer,
            OmniRelayError: answer,
            ClientGoneError: answer,
            Exception: answer,
        },
    )
    app.router.redirect_slashes = False
    app.router.default = _nowhere
    return app


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer what leads nowhere, a WebSocket too."""
    await http_response(HTTPException(404), scope)(scope, receive, send)


def _watched(context: HttpContext) -> list[BaseRoute]:
    health, monitor = HealthApi(context), MonitorApi(context)
    return [
        Route("/metrics", monitor.metrics),
        Route("/livez", health.livez),
        Route("/readyz", health.readyz),
        Route("/health", health.health),
    ]


def _routes(context: HttpContext) -> list[BaseRoute]:
    models, monitor = ModelsApi(context), MonitorApi(context)
    page, realtime = PageApi(), RealtimeApi(context)
    return [
        Route("/", page.index),
        Route("/page/{name}", page.file),
        Route("/v1/chat/completions", ChatApi(context).create, methods=["POST"]),
        Route("/v1/audio/speech", SpeechApi(context).create, methods=["POST"]),
        WebSocketRoute("/v1/realtime", realtime.serve),
        Route("/v1/realtime", realtime.refuse),
        Route("/v1/requests/{request_id}", monitor.request),
        *_watched(context),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.get),
    ]

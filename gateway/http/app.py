"""The ASGI applications: routes, middleware and error handling."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

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
from gateway.http.guards import (
    AccessLog,
    Guard,
    PlainPaths,
    allowed_hosts,
    check_forwarded,
    check_host,
    check_key,
    check_origin,
    is_local,
)
from gateway.http.openai.chat import ChatApi
from gateway.http.openai.completions import CompletionsApi
from gateway.http.openai.models import ModelsApi
from gateway.http.openai.responses import ResponsesApi
from gateway.http.openai.responses_socket import ResponsesSocket
from gateway.http.openai.speech import START_DELAY, SpeechApi
from gateway.http.openai.speech_socket import SpeechSocket
from gateway.http.openai.tokens import TokensApi
from gateway.http.openai.transcription import TranscriptionApi
from gateway.http.openapi import OpenApi
from gateway.http.operations import OperationsApi
from gateway.http.page import PageApi
from gateway.http.realtime.endpoint import RealtimeApi
from omnirelay.errors import CallsDisabledError, MissingPackageError, OmniRelayError
from omnirelay.protocol import parse_tcp

Endpoint = Callable[[Request], Awaitable[Response]]
CLIENT_GONE: Final = 499
"""nginx's status for a client that disconnected; appears only in the log."""


def make_app(context: HttpContext) -> Starlette:
    """Build the application for clients."""
    config = context.config.gateway
    guard = partial(_guard, context)
    middleware = [Middleware(PlainPaths), Middleware(AccessLog)]
    if config.trusted_proxies:
        middleware.append(guard(check_forwarded, context.access.proxies))
    hosts = allowed_hosts(config)
    if hosts is not None:
        middleware.append(guard(check_host, hosts))
    origins = sorted({*config.http_origins, *config.page_origins})
    middleware.append(guard(check_origin, frozenset(origins)))
    if origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[
                "Location",
                "X-Request-Id",
                "X-Client-Request-Id",
                "Retry-After",
                "Retry-After-Ms",
                START_DELAY,
            ],
        )
        middleware.append(cors)
    # After CORS: preflight requests carry no key, and pages of other origins may read why a key is refused.
    middleware.append(guard(check_key, context.access))
    transcription, tokens = TranscriptionApi(context), TokensApi(context)
    models, operations, responses = ModelsApi(context), OperationsApi(context), ResponsesApi(context)
    page, realtime = PageApi(config.page_origins), RealtimeApi(context)
    description = OpenApi(page)
    routes = [
        Route("/", page.index),
        Route("/page/{name}", page.file),
        Route("/openapi.json", description.document),
        Route("/docs", description.page),
        Route("/v1/chat/completions", ChatApi(context).create, methods=["POST"]),
        Route("/v1/completions", CompletionsApi(context).create, methods=["POST"]),
        Route("/v1/responses", responses.create, methods=["POST"]),
        WebSocketRoute("/v1/responses", ResponsesSocket(context, responses).serve),
        Route("/v1/audio/speech", SpeechApi(context).create, methods=["POST"]),
        Route("/v1/audio/transcriptions", transcription.create, methods=["POST"]),
        Route("/v1/audio/translations", transcription.translate, methods=["POST"]),
        Route("/v1/audio/voices", models.voices),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        WebSocketRoute("/v1/audio/speech/stream", SpeechSocket(context).serve),
        WebSocketRoute("/v1/realtime", realtime.serve),
        Route("/v1/realtime", realtime.refuse),
        Route("/v1/realtime/client_secrets", realtime.create_secret, methods=["POST"]),
        *_calls(context, realtime),
        Route("/v1/requests/{request_id}", operations.request),
        *_monitored(operations),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.get),
    ]
    return _app(context, routes, middleware)


def _calls(context: HttpContext, realtime: RealtimeApi) -> list[BaseRoute]:
    """Build the routes of calls, which say so where there are none.

    Raises:
        MissingPackageError: Calls are enabled, and the extra is not installed.
    """
    create: Endpoint = _no_calls
    hang_up: Endpoint = _no_calls
    if context.config.gateway.webrtc.enabled:
        try:
            from gateway.http.realtime.webrtc.endpoint import CallsApi  # noqa: PLC0415 - needs an extra
        except ModuleNotFoundError as error:
            if error.name is not None and error.name.startswith("gateway"):
                raise
            raise MissingPackageError("aiortc (for gateway.webrtc)", "webrtc", "omnirelay-server") from error
        api = CallsApi(context, realtime)
        create, hang_up = api.create, api.hang_up
    return [
        Route("/v1/realtime/calls", create, methods=["POST"]),
        Route("/v1/realtime/calls/{call_id}/hangup", hang_up, methods=["POST"]),
    ]


async def _no_calls(request: Request) -> Response:
    """Refuse calls by WebRTC: gateway.webrtc.enabled is false."""
    del request
    raise CallsDisabledError(
        "this gateway takes no calls by WebRTC: use the WebSocket /v1/realtime, or set "
        "gateway.webrtc.enabled (needs pip install 'omnirelay-server[webrtc]')"
    )


def make_monitor_app(address: str, context: HttpContext) -> Starlette:
    """Build the application for health checks and metrics, listening at ``address``."""
    middleware = [Middleware(AccessLog)]
    if is_local(parse_tcp(address)[0]):
        middleware.append(_guard(context, check_host, frozenset()))
    return _app(context, _monitored(OperationsApi(context)), middleware)


def _guard(context: HttpContext, check: Callable[[Any, Scope], None], allowed: Any) -> Middleware:
    return Middleware(Guard, partial(check, allowed), context.told)


def _monitored(operations: OperationsApi) -> list[BaseRoute]:
    return [
        Route("/metrics", operations.metrics),
        Route("/livez", operations.livez),
        Route("/readyz", operations.readyz),
        Route("/health", operations.health),
        Route("/version", operations.version),
    ]


def _app(context: HttpContext, routes: list[BaseRoute], middleware: list[Middleware]) -> Starlette:
    async def answer(request: Request, error: Exception) -> Response:
        """Turn an exception of an endpoint or the router into a response."""
        if isinstance(error, HTTPException):
            return http_response(error, request.scope)
        if isinstance(error, ClientGoneError):
            return Response(status_code=CLIENT_GONE)
        known = error if isinstance(error, OmniRelayError) else OmniRelayError("see the gateway's log")
        context.told(known)
        return response_of(known)

    kinds = (HTTPException, OmniRelayError, ClientGoneError, Exception)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=dict.fromkeys(kinds, answer))
    app.router.redirect_slashes = False
    app.router.default = _not_found
    return app


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer an unknown path, of a WebSocket too."""
    await http_response(HTTPException(404), scope)(scope, receive, send)

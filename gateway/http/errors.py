"""Errors in the form that OpenAI's clients know, with the status that goes with each."""

import math
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from omnirelay.errors import (
    BusyError,
    CancelledRequestError,
    DeadlineError,
    InvalidRequestError,
    MediaTooLargeError,
    OmniRelayError,
    OriginError,
    PoisonRequestError,
    RequestTooLargeError,
    SlowUploadError,
    StageUnavailableError,
    StoppingError,
    UnauthenticatedError,
    UnknownModelError,
    UnknownRequestError,
)

STATUS: Final[dict[type[OmniRelayError], int]] = {
    InvalidRequestError: 400,
    UnauthenticatedError: 401,
    OriginError: 403,
    UnknownModelError: 404,
    UnknownRequestError: 404,
    SlowUploadError: 408,
    RequestTooLargeError: 413,
    MediaTooLargeError: 413,
    # Not 5xx: clients repeat these by themselves, and each time costs engines.
    PoisonRequestError: 422,
    BusyError: 429,
    # Not the client's doing: whoever balances load asks another gateway.
    StoppingError: 503,
    # A client that goes away hears nothing; one that hears this is told that the gateway stops.
    CancelledRequestError: 503,
    StageUnavailableError: 503,
    DeadlineError: 504,
}
"""Of the errors of these classes and of their children; 500 is that of all others."""
TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES: Final = {404: "not_found", 405: "method_not_allowed", 426: "upgrade_required"}
"""Of errors that have no class: nothing was asked that could have failed."""
MAX_SAID: Final = 128
"""Most characters that are repeated of a path or a method."""
JSON: Final = "application/json"


def status_of(error: OmniRelayError) -> int:
    """Give the status of an error."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def body_of(error: OmniRelayError) -> dict[str, Any]:
    """Give the object that tells an error, in an answer or in a stream."""
    param = error.param if isinstance(error, InvalidRequestError) else None
    return _body(status_of(error), str(error), error.code, param)


def response_of(error: OmniRelayError) -> Response:
    """Give the answer that tells an error."""
    headers = {}
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["Retry-After-Ms"] = str(error.retry_after_ms)
    return json_response(body_of(error), status_of(error), headers)


def http_response(error: HTTPException, scope: Scope) -> Response:
    """Give the answer for a path or method that does not exist."""
    code = CODES.get(error.status_code, "invalid_request")
    path, message = scope["path"][:MAX_SAID], error.detail
    if error.status_code == 404:
        message = f"there is no path {path!r} here: docs/api.md lists the endpoints"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path!r} does not take {scope['method'][:MAX_SAID]!r}, only {allowed}"
    return json_response(_body(error.status_code, message, code, None), error.status_code, error.headers)


def malformed(problem: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Give headers and body of the answer to what is not an HTTP request."""
    body = msgspec.json.encode(_body(400, problem, "invalid_request", None))
    headers = [(b"content-type", JSON.encode()), (b"content-length", str(len(body)).encode())]
    return [*headers, (b"connection", b"close")], body


def json_response(body: Any, status: int = 200, headers: Any = None) -> Response:
    """Give an answer in JSON."""
    return Response(msgspec.json.encode(body), status, headers, JSON)


def _body(status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

"""Errors as responses: OpenAI's form, and the status of each class."""

import math
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from omnirelay.errors import (
    BusyError,
    CallsDisabledError,
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
    # Not 5xx: clients retry those automatically, and each retry may end an engine.
    PoisonRequestError: 422,
    BusyError: 429,
    CallsDisabledError: 501,
    # A load balancer then tries another gateway.
    StoppingError: 503,
    # Only sent when the gateway shuts down: a client that cancelled is gone.
    CancelledRequestError: 503,
    StageUnavailableError: 503,
    DeadlineError: 504,
}
"""Also for subclasses; all other errors are 500."""
TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES: Final = {404: "not_found", 405: "method_not_allowed", 426: "upgrade_required"}
"""Codes of the router's errors, which have no class."""
RETRY_UNAVAILABLE_S: Final = 5
"""When a client should ask again if a stage is missing: most are back within seconds."""
MAX_SAID: Final = 128
"""Characters of a path or method that a message quotes at most."""
JSON: Final = "application/json"


def status_of(error: OmniRelayError) -> int:
    """Return the HTTP status of an error."""
    return next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 500)


def body_of(error: OmniRelayError) -> dict[str, Any]:
    """Build OpenAI's error object."""
    param = error.param if isinstance(error, InvalidRequestError) else None
    return _body(status_of(error), str(error), error.code, param)


def response_of(error: OmniRelayError) -> Response:
    """Build the response for an error."""
    headers = {}
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BusyError):
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000))
        headers["Retry-After-Ms"] = str(error.retry_after_ms)
    elif status_of(error) == 503:
        headers["Retry-After"] = str(RETRY_UNAVAILABLE_S)
    return json_response(body_of(error), status_of(error), headers)


def http_response(error: HTTPException, scope: Scope) -> Response:
    """Build the response for an unknown path or method."""
    code = CODES.get(error.status_code, "invalid_request")
    path, message = scope["path"][:MAX_SAID], error.detail
    if error.status_code == 404:
        message = f"there is no path {path!r} here: /docs of this gateway lists them, as docs/api.md does"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{path!r} does not take {scope['method'][:MAX_SAID]!r}, only {allowed}"
    return json_response(_body(error.status_code, message, code, None), error.status_code, error.headers)


def malformed(problem: str) -> tuple[str, bytes]:
    """Build type and body of the response to an invalid HTTP request."""
    return JSON, msgspec.json.encode(_body(400, problem, "invalid_request", None))


def json_response(body: Any, status: int = 200, headers: Any = None) -> Response:
    """Build a JSON response."""
    return Response(msgspec.json.encode(body), status, headers, JSON)


def _body(status: int, message: str, code: str, param: str | None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

"""Reading the body of a request: bounded in bytes and in time, and parsed beside the event loop if large."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from gateway.fairness.uploads import IncomingUpload
from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.guards.keys import client_of
from omnirelay.errors import InvalidRequestError, RequestTooLargeError
from omnirelay.protocol import PIECE_BYTES

MAX_VALUES: Final = 2**20
"""Of JSON in one body, text counted that looks like it: what a body may become in memory."""
COUNT_PIECE: Final = 2**20
LONE_SURROGATE: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?:[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
)
"""The first half of a pair, and something behind it that is not the second."""
HALF_A_PAIR: Final = "a string holds half of a surrogate pair, as \\ud83d without \\ude00 behind it"

T = TypeVar("T")


async def read_body(request: Request, context: HttpContext, parse: Callable[[bytearray], T]) -> T:
    """Read and parse the body of a request; nothing keeps the bytes afterwards.

    Args:
        request: The request.
        context: The gateway's parts.
        parse: Called with all bytes, on another thread if they are many.

    Raises:
        BusyError: The client may begin no request now, and nothing was read; or memory is short.
        UnauthenticatedError: Its key was withdrawn.
        RequestTooLargeError: It is longer than allowed.
        SlowUploadError: It comes too slowly.
        ClientGoneError: It does not come any more.
        OmniRelayError: From ``parse``.
    """
    client = client_of(request.scope)
    client.check()
    limit = context.config.gateway.limits.request_bytes
    if client.limits.request_bytes is not None:
        limit = min(limit, client.limits.request_bytes)
    _check_announced(request, limit)
    async with context.uploads.reading(context.share(request)) as upload:
        body = await _receive(request, upload, limit)
        return await asyncio.to_thread(parse, body) if len(body) > PIECE_BYTES else parse(body)


def read_object(body: bytearray) -> dict[str, Any]:
    """Give the JSON object that a body is.

    Raises:
        InvalidRequestError: It is none, or has too many values.
    """
    starts = range(0, len(body), COUNT_PIECE)
    # Piece by piece: other threads get their turn in between.
    values = sum(body.count(mark, start, start + COUNT_PIECE) for start in starts for mark in b"{[,")
    if values > MAX_VALUES:
        raise InvalidRequestError(f"the body has more than {MAX_VALUES} values")
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec says of half a pair that the body ends there.
        cut = "truncated" in str(error)
        problem = HALF_A_PAIR if cut and LONE_SURROGATE.search(body) else error
        raise InvalidRequestError(f"the body cannot be read as a JSON object: {problem}") from error


def _check_announced(request: Request, limit: int) -> None:
    """Refuse a body that is said to be too long.

    Raises:
        RequestTooLargeError: It is.
    """
    # The server has checked that it is a number.
    size = int(request.headers.get("content-length", 0))
    if size > limit:
        raise _too_large(size, limit)


async def _receive(request: Request, upload: IncomingUpload, limit: int) -> bytearray:
    try:
        async for piece in request.stream():
            if upload.size + len(piece) > limit:
                raise _too_large(upload.size + len(piece), limit)
            upload.add(piece)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return upload.finish()


def _too_large(size: int, limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the body has at least {size} bytes, at most {limit} are read (gateway.limits.request_bytes, "
        "or request_bytes of the API key)"
    )

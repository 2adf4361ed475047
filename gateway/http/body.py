"""Reading the body of a request: bounded in bytes and in time, and parsed beside the event loop if large."""

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.keys import client_of
from gateway.protocol import PIECE_BYTES
from shared.errors import InvalidRequestError, RequestTooLargeError, SlowUploadError

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
        BusyError: The client may begin no request now; nothing was read.
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
    size = _announced(request, limit)
    if size <= PIECE_BYTES:
        return parse(await _receive(request, size, context.uploads.limit_s(size)))
    async with context.uploads.take(size, client.name):
        body = await _receive(request, size, context.uploads.limit_s(size))
        return await asyncio.to_thread(parse, body)


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


def _announced(request: Request, limit: int) -> int:
    """How long the body is, or may be at most.

    Raises:
        RequestTooLargeError: That is too long.
    """
    header = request.headers.get("content-length")
    if header is None:
        return limit if "transfer-encoding" in request.headers else 0
    # The server has checked that it is a number.
    size = int(header)
    if size > limit:
        raise _too_large(size, limit)
    return size


async def _receive(request: Request, limit: int, limit_s: float) -> bytearray:
    body = bytearray()
    try:
        async with asyncio.timeout(limit_s):
            async for piece in request.stream():
                if len(body) + len(piece) > limit:
                    raise _too_large(len(body) + len(piece), limit)
                body += piece
    except TimeoutError as error:
        raise SlowUploadError(f"{len(body)} bytes of the body came in {limit_s:.0f} s") from error
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return body


def _too_large(size: int, limit: int) -> RequestTooLargeError:
    return RequestTooLargeError(
        f"the body has at least {size} bytes, at most {limit} are read (gateway.limits.request_bytes, "
        "or request_bytes of the API key)"
    )

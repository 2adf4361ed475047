"""Request bodies: read within bounds on size and time, and parsed off the event loop if large."""

import asyncio
import codecs
import re
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from gateway.fairness.uploads import IncomingUpload
from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.guards import client_of
from omnirelay.errors import InvalidRequestError, RequestTooLargeError, UnsupportedError
from omnirelay.protocol import PIECE_BYTES

MAX_VALUES: Final = 2**20
"""JSON values of one body (brackets and commas, even in strings): bounds the memory of the parsed body."""
MAX_MEMBERS: Final = 2**17
"""Lists, objects and members of objects of one (brackets and colons, even in strings).

Nothing interrupts the parser, which takes longest for these: some 50 ms.
"""
SMALL_BYTES: Final = 2**14
"""Up to this size what a client sends is parsed at once: schemas of functions take 2 ms a KiB."""
COUNT_PIECE: Final = 2**20
SEARCHED: Final = 2**18
"""Bytes that are searched at once."""
_BOUNDS: Final = (
    (b"{[,", MAX_VALUES, "values"),
    (b"{[:", MAX_MEMBERS, "lists, objects and members of objects"),
)
LONE_SURROGATE: Final = re.compile(
    rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?:[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
)
"""A high surrogate that no low surrogate follows."""
HALF_A_PAIR: Final = "a string holds half of a surrogate pair, as \\ud83d without \\ude00 behind it"

S = TypeVar("S", str, bytearray)
T = TypeVar("T")


async def read_body(
    request: Request, context: HttpContext, parse: Callable[[bytearray], T], most: int | None = None
) -> T:
    """Read the body of a request, and parse it, on another thread if it is large; its bytes are not kept.

    Args:
        most: Most bytes of it, where fewer than the configured limit are enough.

    Raises:
        BusyError: The client's rate limit is reached (before anything is read), or memory is short.
        UnauthenticatedError: The client's key was withdrawn.
        RequestTooLargeError: The body exceeds the limit.
        SlowUploadError: The body arrives too slowly.
        ClientGoneError: The client disconnected.
        OmniRelayError: From ``parse``.
    """
    client = client_of(request.scope)
    client.check()
    limit = client.most_bytes(context.config.gateway.limits.request_bytes)
    if most is not None:
        limit = min(limit, most)
    # h11 has checked that it is a number.
    _check_size(int(request.headers.get("content-length", 0)), limit)
    async with context.uploads.reading(context.share(request)) as upload:
        body = await _receive(request, upload, limit)
        return await parsed(context, context.share(request), parse, body)


async def parsed(context: HttpContext, client: str, parse: Callable[[S], T], given: S) -> T:
    """Parse what a client sent, on the thread for it if it is large; errors are those of ``parse``."""
    return await context.parsing.run(client, parse, given) if len(given) > SMALL_BYTES else parse(given)


def size_of(text: str) -> int:
    """Return how many bytes a text takes at most: one wide character makes all as wide."""
    return len(text) if text.isascii() else 4 * len(text)


def read_object(body: bytearray, what: str = "the body") -> dict[str, Any]:
    """Parse a body, or what errors call ``what``, that must be a JSON object.

    Raises:
        InvalidRequestError: It is not one, or has too many values.
    """
    starts = range(0, len(body), COUNT_PIECE)
    # In pieces, so that other threads can run in between.
    for marks, most, parts in _BOUNDS:
        if sum(body.count(mark, start, start + COUNT_PIECE) for start in starts for mark in marks) > most:
            raise InvalidRequestError(f"{what} has more than {most} {parts}")
    start = len(codecs.BOM_UTF8) if body.startswith(codecs.BOM_UTF8) else 0
    try:
        return msgspec.json.decode(memoryview(body)[start:], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec reports a lone surrogate as truncated input.  All of a large body would take seconds.
        cut = "truncated" in str(error)
        problem = HALF_A_PAIR if cut and LONE_SURROGATE.search(body, 0, SEARCHED) else error
        raise InvalidRequestError(f"{what} cannot be read as a JSON object: {problem}") from error


def find(body: bytearray, mark: bytes, start: int = 0, end: int | None = None) -> int:
    """Do ``body.find`` in pieces, so that other threads can run in between."""
    end = len(body) if end is None else end
    while start < end:
        found = body.find(mark, start, min(start + SEARCHED + len(mark) - 1, end))
        if found >= 0:
            return found
        start += SEARCHED
    return -1


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise RequestTooLargeError(
            f"the body has {size} bytes or more, the limit is {limit} (the endpoint's, "
            "gateway.limits.request_bytes, or request_bytes of the API key)"
        )


async def _receive(request: Request, upload: IncomingUpload, limit: int) -> bytearray:
    try:
        async for piece in _unpacked(request):
            _check_size(upload.size + len(piece), limit)
            upload.add(piece)
    except ClientDisconnect as error:
        raise ClientGoneError from error
    return upload.finish()


async def _unpacked(request: Request) -> AsyncIterator[bytes]:
    """Yield the pieces of a body, which a client may have packed by gzip (RFC 9110, 8.4.1.3)."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding == "identity":
        async for piece in request.stream():
            yield piece
        return
    if coding not in ("gzip", "x-gzip"):
        raise UnsupportedError(f"Content-Encoding can be gzip or identity, not {coding[:64]!r}")
    unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        async for piece in request.stream():
            left, unpacked = piece, b""
            while left or len(unpacked) == PIECE_BYTES:
                # In pieces of bounded size: a packed byte can stand for a thousand.
                unpacked = unpacker.decompress(left, PIECE_BYTES)
                yield unpacked
                left = unpacker.unconsumed_tail
                await asyncio.sleep(0)
            if unpacker.unused_data:
                # More would be kept uncounted, and copied with each piece that comes.
                break
    except zlib.error as error:
        raise InvalidRequestError(f"the body cannot be unpacked as gzip: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise InvalidRequestError("the body is not one whole gzip stream")

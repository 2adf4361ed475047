"""Requests that a TCP client uploads in pieces."""

import asyncio
from typing import Final

import msgspec

from gateway.fairness.uploads import UploadRoom
from omnirelay.errors import InvalidRequestError, MessageError, RequestError, RequestTooLargeError
from omnirelay.protocol import MAX_PIECE_BYTES, PIECE_BYTES, Piece

MAX_VALUES: Final = PIECE_BYTES
"""Values of a message, each of which takes the decoder up to 0.1 us: what is small cannot have more."""
_SIZED: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length of binary, extended and string values, by the first byte."""
_FIXED: Final = {
    **{0xA0 | size: size for size in range(32)},
    **dict(zip(range(0xCA, 0xD9), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 2, 3, 5, 9, 17), strict=True)),
    **dict(zip(range(0xDC, 0xE0), (2, 4, 2, 4), strict=True)),
}
"""Bytes that follow the first one, where there are any; values within lists and maps count by themselves."""


async def require_few_values(message: bytearray) -> None:
    """Refuse a msgpack message for which nothing could interrupt the decoder for long.

    Raises:
        MessageError: It has more than :data:`MAX_VALUES` values.
    """
    if len(message) > PIECE_BYTES and not await asyncio.to_thread(_has_few_values, message):
        raise MessageError(f"a message has more than {MAX_VALUES} values")


def _has_few_values(message: bytearray) -> bool:
    at = 0
    for _ in range(MAX_VALUES):
        if at >= len(message):
            return True
        first, start = message[at], at + 1
        if (width := _SIZED.get(first)) is None:
            at = start + _FIXED.get(first, 0)
        else:
            # The type of an extended value has a byte.
            size = int.from_bytes(message[start : start + width], "big")
            at = start + width + size + (0xC7 <= first <= 0xC9)
    return at >= len(message)


class Incoming:
    """One request being uploaded; ``share`` is the quota of memory that it uses."""

    def __init__(self, uploads: UploadRoom, share: str, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._whole: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()
        # A connection has many of them at a time: together small ones are not small.
        self._upload = uploads.open(share, self._fail, uncounted=0)

    def add(self, piece: Piece) -> None:
        """Take a piece, unless the upload has failed."""
        if self._whole.done():
            return
        if (problem := self._problem(piece)) is not None:
            self._fail(problem)
            return
        self._upload.add(piece.data)
        if piece.last and self._upload.error is None:
            self._whole.set_result(self._upload.finish())

    async def whole(self) -> msgspec.Raw:
        """Wait for the complete request; RequestError if it is invalid, too long or slow, or has no room."""
        try:
            whole = await self._whole
            await require_few_values(whole)
            return msgspec.Raw(whole)
        except MessageError as error:
            raise InvalidRequestError(f"the request is not valid: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Discard the upload; may be called again."""
        self._upload.close()
        self._whole.cancel()

    def _problem(self, piece: Piece) -> RequestError | None:
        come, size = self._upload.size, len(piece.data)
        if piece.offset != come:
            return InvalidRequestError(f"a piece begins at {piece.offset}, but {come} bytes have come")
        if size > MAX_PIECE_BYTES:
            return InvalidRequestError(f"a piece has {size} bytes, at most {MAX_PIECE_BYTES} are taken")
        if come + size > self._max_bytes:
            return RequestTooLargeError(
                f"the request has at least {come + size} bytes, at most {self._max_bytes} are read "
                "(gateway.limits.request_bytes, or request_bytes of the API key)"
            )
        return None

    def _fail(self, error: RequestError) -> None:
        self._upload.close()
        if not self._whole.done():
            self._whole.set_exception(error)

"""Requests that a TCP client uploads in pieces."""

import asyncio
from typing import Final

import msgspec

from gateway.fairness.uploads import UploadRoom
from omnirelay.errors import InvalidRequestError, RequestError, RequestTooLargeError
from omnirelay.protocol import MAX_PIECE_BYTES, Piece


class Incoming:
    """One request being uploaded; ``share`` is the quota of memory that it uses."""

    def __init__(self, uploads: UploadRoom, share: str, max_bytes: int) -> None:
        self._max_bytes: Final = max_bytes
        self._whole: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()
        self._upload = uploads.open(share, self._fail)

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
            return msgspec.Raw(await self._whole)
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

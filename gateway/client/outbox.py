"""Frames on their way to the gateway: files are not copied into them, and nothing waits for a whole one."""

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.parts import ChatMessage, MediaPart, media_of
from gateway.protocol import (
    LENGTH_BYTES,
    PIECE_BYTES,
    GenerateRequest,
    Submit,
    Welcome,
)
from shared.errors import InvalidRequestError, MediaTooLargeError
from shared.payloads import Blob

Pieces = list[bytes | memoryview]
"""A frame: its pieces, one behind the other."""
MARK_BYTES: Final = 16
MAX_FRAME_BYTES: Final = 2**32 - 1
"""What a frame's length can say."""
_BIN8, _BIN32 = 0xC4, 0xC6
log = logging.getLogger(__name__)


@dataclass
class Upload:
    """How far a frame is on its way.

    Attributes:
        total_bytes: Its length.
        sent_bytes: Of them, taken by the connection, which holds a few that the gateway has not read.
    """

    total_bytes: int
    sent_bytes: int = 0


def submit_pieces(client_id: int, request: GenerateRequest, limits: Welcome) -> Pieces:
    """Give the frame of a request; its files are referred to, not copied.

    Args:
        client_id: The client's name of the request.
        request: The request.
        limits: The gateway's.

    Raises:
        MediaTooLargeError: A file, or all together, is more than the gateway takes.
        InvalidRequestError: The request is longer than the gateway reads, a text is not Unicode, or a number
            is beyond 64 bits.
    """
    _check_media(request, limits)
    mark = secrets.token_bytes(MARK_BYTES)
    marked = msgspec.structs.replace(request, messages=[_marked(each, mark) for each in request.messages])
    try:
        body = msgspec.msgpack.encode(Submit(client_id, msgspec.Raw(msgspec.msgpack.encode(marked))))
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from error
    first, *others = body.split(bytes([_BIN8, MARK_BYTES]) + mark)
    data = [Blob(part.data).view for _, part in media_of(request.messages) if part.data is not None]
    pieces: Pieces = [first]
    for view, between in zip(data, others, strict=True):
        pieces += [bytes([_BIN32]) + len(view).to_bytes(4, "big"), view, between]
    length = sum(map(len, pieces))
    most = limits.max_frame_bytes or MAX_FRAME_BYTES
    if length > most:
        raise InvalidRequestError(
            f"the request takes {length} bytes, the gateway reads at most {most} "
            "(gateway.limits.request_bytes)"
        )
    return [length.to_bytes(LENGTH_BYTES, "big"), *pieces]


class Outbox:
    """Writes frames in order, a piece at a time, as fast as the gateway reads.

    Args:
        writer: To the gateway.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._frames: asyncio.Queue[tuple[Pieces, Upload]] = asyncio.Queue()

    def put(self, frame: Pieces) -> Upload:
        """Write a frame behind those that wait; gives how far it is, kept up to date."""
        upload = Upload(sum(map(len, frame)))
        self._frames.put_nowait((frame, upload))
        return upload

    async def run(self) -> None:
        """Write until the connection is lost."""
        try:
            while True:
                frame, upload = await self._frames.get()
                for piece in frame:
                    await self._write(memoryview(piece), upload)
        except OSError as error:
            # Who reads from the connection learns of it too, and tells.
            log.debug("cannot write to the gateway any more: %s", error)

    async def _write(self, piece: memoryview, upload: Upload) -> None:
        for start in range(0, len(piece), PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            self._writer.write(part)
            await self._writer.drain()
            upload.sent_bytes += len(part)
            # Draining does not wait while the gateway reads fast, and others on this loop want their turn.
            await asyncio.sleep(0)


def _check_media(request: GenerateRequest, limits: Welcome) -> None:
    total = 0
    for name, part in media_of(request.messages):
        total += part.nbytes
        if limits.max_item_bytes is not None and part.nbytes > limits.max_item_bytes:
            raise MediaTooLargeError(
                f"{name}: {part.nbytes} bytes, the gateway takes at most {limits.max_item_bytes} "
                "(media.max_item_bytes)"
            )
    most = limits.max_media_bytes or MAX_FRAME_BYTES
    if total > most:
        raise MediaTooLargeError(
            f"{total} bytes of media together, the gateway takes at most {most} (media.max_request_bytes)"
        )


def _marked(message: ChatMessage, mark: bytes) -> ChatMessage:
    """The same message with a mark in place of each file."""
    if isinstance(message.content, str):
        return message
    view = memoryview(mark)
    return ChatMessage(
        message.role,
        [
            msgspec.structs.replace(part, data=view)
            if isinstance(part, MediaPart) and part.data is not None
            else part
            for part in message.content
        ],
    )

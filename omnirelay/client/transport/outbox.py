"""Sends requests: files are not copied, and cancels do not wait for uploads."""

import asyncio
import logging
import secrets
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from omnirelay.content import ChatMessage, MediaPart, media_of
from omnirelay.errors import InvalidRequestError, MediaTooLargeError
from omnirelay.protocol import (
    LENGTH_BYTES,
    MAX_PIECE_BYTES,
    PIECE_BYTES,
    GenerateRequest,
    Piece,
    Submit,
    Welcome,
    pack,
)

Pieces = list[bytes | memoryview]
"""A frame or a request, in consecutive pieces."""
MAX_SUBMIT_BYTES: Final = 64
"""Overhead of :class:`omnirelay.protocol.Submit`."""
MARK_BYTES: Final = 16
MAX_FRAME_BYTES: Final = 2**32 - 1
"""Largest length that a frame's header can hold."""
_BIN8, _BIN32 = 0xC4, 0xC6
log = logging.getLogger(__name__)


@dataclass
class UploadProgress:
    """How much of a request has been sent.

    Attributes:
        total_bytes: Its length.
        sent_bytes: Bytes written to the connection, which buffers a few.
    """

    total_bytes: int
    sent_bytes: int = 0


def request_pieces(request: GenerateRequest, limits: Welcome) -> Pieces:
    """Encode a request; its files are referenced, not copied.

    Raises:
        MediaTooLargeError: Media exceed the gateway's limits.
        InvalidRequestError: The request is too long, a text is not Unicode, or a number exceeds 64 bits.
    """
    _check_media(request, limits)
    mark = secrets.token_bytes(MARK_BYTES)
    marked = msgspec.structs.replace(request, messages=[_marked(each, mark) for each in request.messages])
    try:
        body = msgspec.msgpack.encode(marked)
    except (UnicodeEncodeError, OverflowError) as error:
        # msgspec names no field.
        parts = (request, request.text_sampling, request.codec_sampling)
        long = [name for part in parts for name in part.__struct_fields__ if _is_long(getattr(part, name))]
        what = f"{', '.join(long)}: " if long else ""
        raise InvalidRequestError(f"the request cannot be sent: {what}{error}", *long[:1]) from error
    first, *others = body.split(bytes([_BIN8, MARK_BYTES]) + mark)
    data = [
        memoryview(part.data).cast("B") for _, part in media_of(request.messages) if part.data is not None
    ]
    pieces: Pieces = [first]
    for view, between in zip(data, others, strict=True):
        pieces += [bytes([_BIN32]) + len(view).to_bytes(4, "big"), view, between]
    length = sum(map(len, pieces)) + MAX_SUBMIT_BYTES
    most = limits.max_frame_bytes or MAX_FRAME_BYTES
    if length > most:
        raise InvalidRequestError(
            f"the request has {length} bytes, the gateway takes at most {most} (gateway.limits.request_bytes)"
        )
    return pieces


def _is_long(value: object) -> bool:
    return isinstance(value, int) and not -(2**63) <= value < 2**64


def frames_of(client_id: int, pieces: Pieces, limits: Welcome) -> Iterator[Pieces]:
    """The frames of a request: one, or many if it is long and the gateway takes pieces."""
    length = sum(map(len, pieces))
    if length <= PIECE_BYTES - MAX_SUBMIT_BYTES or limits.max_piece_bytes is None:
        # The request is the last field, so it is the end of the message.
        head = msgspec.msgpack.encode(Submit(client_id, msgspec.Raw(b"")))
        yield [(len(head) + length).to_bytes(LENGTH_BYTES, "big"), head, *pieces]
        return
    offset = 0
    for data in _cut(pieces, min(limits.max_piece_bytes, MAX_PIECE_BYTES)):
        yield [pack(Piece(client_id, offset, data, last=offset + len(data) == length))]
        offset += len(data)


class Outbox:
    """Writes to the gateway; short messages do not wait for long ones.

    Cancels and queries go first, then requests of one frame; uploads of several frames share what is left.

    Attributes:
        written_bytes: Of requests, taken by the system.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.written_bytes = 0
        self._writer = writer
        self._short: deque[bytes] = deque()
        self._requests: dict[int, _Request] = {}
        self._uploads: dict[int, _Request] = {}
        self._more = asyncio.Event()
        _keep_little_unsent(writer)

    def say(self, frame: bytes) -> None:
        """Send a short frame after the one that is being written."""
        self._short.append(frame)
        self._more.set()

    def submit(self, client_id: int, pieces: Pieces, limits: Welcome) -> UploadProgress:
        """Queue a request; the result is kept up to date."""
        upload = UploadProgress(sum(map(len, pieces)))
        frames = frames_of(client_id, pieces, limits)
        queue = self._requests if upload.total_bytes <= PIECE_BYTES else self._uploads
        queue[client_id] = _Request(frames, upload)
        self._more.set()
        return upload

    def withdraw(self, client_id: int) -> bool:
        """Send no more of a request, and return whether none of it was sent."""
        request = self._requests.pop(client_id, None) or self._uploads.pop(client_id, None)
        return request is not None and not request.begun

    async def run(self) -> None:
        """Write until the connection is lost."""
        try:
            while True:
                await self._more.wait()
                self._more.clear()
                while self._short or self._requests or self._uploads:
                    for queue in (self._requests, self._uploads):
                        while self._short:
                            await self._write([self._short.popleft()])
                        if queue:
                            await self._send_next(queue)
        except OSError as error:
            # The reading task reports it.
            log.debug("cannot write to the gateway: %s", error)

    async def _send_next(self, queue: "dict[int, _Request]") -> None:
        """Write the next frame of the oldest request."""
        client_id, request = next(iter(queue.items()))
        request.begun = True
        frame = next(request.frames, None)
        if frame is None:
            request.upload.sent_bytes = request.upload.total_bytes
            # It may have been withdrawn during its last frame.
            queue.pop(client_id, None)
        else:
            await self._write(frame, request.upload)

    async def _write(self, frame: Pieces, upload: UploadProgress | None = None) -> None:
        for piece in (memoryview(each) for each in frame):
            for start in range(0, len(piece), PIECE_BYTES):
                part = piece[start : start + PIECE_BYTES]
                self._writer.write(part)
                await self._writer.drain()
                if upload is not None:
                    self.written_bytes += len(part)
                    upload.sent_bytes = min(upload.sent_bytes + len(part), upload.total_bytes)
                # drain() does not yield while the gateway reads fast.
                await asyncio.sleep(0)


@dataclass
class _Request:
    frames: Iterator[Pieces]
    upload: UploadProgress
    begun: bool = False


def _cut(pieces: Pieces, size: int) -> Iterator[bytes]:
    """Cut into pieces of one size; the last may be shorter."""
    piece = bytearray()
    for view in (memoryview(each) for each in pieces):
        start = 0
        while start < len(view):
            part = view[start : start + size - len(piece)]
            piece += part
            start += len(part)
            if len(piece) == size:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


def _keep_little_unsent(writer: asyncio.StreamWriter) -> None:
    """Keep the kernel's send buffer short: a cancel waits behind all of it."""
    connection = writer.get_extra_info("socket")
    if connection is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_PIECE_BYTES)


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
    """The message with a marker in place of each file."""
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

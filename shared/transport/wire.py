"""Messages to ZeroMQ frames and back.

The first frame is one byte of :data:`WIRE_VERSION` and the msgpack header.  Each :class:`Blob` is a frame
of its own, named in the header by index and size.  A socket decodes only the types declared for it, and
allocates nothing because of a declared size.
"""

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from omnirelay.errors import MessageError, PayloadError, VersionError, said
from omnirelay.version import version
from shared.messages import MAX_MEDIA_ITEMS
from shared.messages.payloads import DEFAULT_MAX_PAYLOAD_BYTES, Blob

WIRE_VERSION: Final = 8
MAX_HEADER_BYTES: Final = 8 * 2**20
"""Largest header; the longest legal prompt needs about 5 MiB."""
MAX_FRAMES: Final = 1 + MAX_MEDIA_ITEMS
VERSION_BYTE: Final = bytes([WIRE_VERSION])

Frame = bytes | memoryview
M = TypeVar("M")


def encode(message: object) -> list[Frame]:
    """Encode a message of :mod:`shared.messages` as a header and one frame per blob; blobs are not copied."""
    blobs: list[Frame] = []

    def give_blob(value: Any) -> list[int]:
        if not isinstance(value, Blob):
            raise NotImplementedError(f"{type(value).__name__} cannot be in a message")
        blobs.append(value.view)
        return [len(blobs) - 1, value.nbytes]

    header = msgspec.msgpack.encode(message, enc_hook=give_blob)
    return [VERSION_BYTE + header, *blobs]


class Decoder(Generic[M]):
    """Decodes and checks the messages of one socket, whose types are ``union``."""

    def __init__(self, union: Any, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union, dec_hook=self._take_blob)
        self._blobs: Sequence[Frame] = ()
        self._unused: set[int] = set()

    def decode(self, frames: Sequence[Frame]) -> M:
        """Decode frames; blobs of the message refer to them.

        Raises:
            VersionError: The message has another version of the format.
            PayloadError: A blob is too large, missing, or not of the declared size.
            MessageError: The header cannot be read, or its type is not allowed here.
        """
        header = self._check_frames(frames)
        self._blobs = frames[1:]
        self._unused = set(range(len(self._blobs)))
        try:
            message = self._decoder.decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"header cannot be read: {said(error)}") from error
        finally:
            self._blobs = ()
        if self._unused:
            raise PayloadError("frames", f"{len(self._unused)} frames that no field refers to")
        check = getattr(message, "check", None)
        if check is not None:
            check()
        return message

    def _take_blob(self, kind: type, reference: Any) -> Blob:
        """The frame of a header's blob field; each may be used once."""
        if kind is not Blob:
            raise NotImplementedError(f"{kind.__name__} cannot be in a message")
        if not (isinstance(reference, list) and [type(item) for item in reference] == [int, int]):
            raise PayloadError("frames", "a blob is named by its index and its size")
        index, nbytes = reference
        if index not in self._unused:
            raise PayloadError("frames", f"frame {index} is missing or named twice")
        self._unused.discard(index)
        frame = self._blobs[index]
        if len(frame) != nbytes:
            raise PayloadError("frames", f"frame {index} holds {len(frame)} bytes, not {nbytes}")
        return Blob(frame)

    def _check_frames(self, frames: Sequence[Frame]) -> memoryview:
        if not frames or len(frames[0]) < 2:
            raise MessageError("message without a header")
        if len(frames) > MAX_FRAMES:
            raise MessageError(f"message of {len(frames)} frames, at most {MAX_FRAMES} are allowed")
        header = memoryview(frames[0])
        if header[0] != WIRE_VERSION:
            raise VersionError(
                f"message of version {header[0]}, this build speaks {WIRE_VERSION}: all processes "
                f"of a stack need one version of OmniRelay, this is {version()}"
            )
        if len(header) > MAX_HEADER_BYTES:
            raise MessageError(f"header of {len(header)} bytes, at most {MAX_HEADER_BYTES} are allowed")
        for index, frame in enumerate(frames[1:]):
            if len(frame) > self._max_payload_bytes:
                raise PayloadError(
                    "frames", f"frame {index} holds {len(frame)} bytes, at most {self._max_payload_bytes}"
                )
        return header[1:]

"""Refuses files that are cut short, as far as their outermost structure tells.

FFmpeg reads such files up to their last whole packet and says nothing.
"""

import struct
from typing import Final

from omnirelay.errors import MediaError
from services.thinker.media.files.formats import Format
from services.thinker.media.files.mpeg_audio import HEADER, frame_length, is_sync, tags_length

_CHUNK: Final = struct.Struct("<4sI")
_RIFF_HEADER: Final = 12
_LENGTH_UNKNOWN: Final = 0x7FFF0000
"""Programs that write wav to a pipe declare a length near this, or 2^32 - 1, or 0."""

_BOX: Final = struct.Struct(">I4s")
_BOX_LENGTH: Final = struct.Struct(">Q")
_BOXES: Final = (b"ftyp", b"moov", b"moof", b"mdat")

_SEGMENT: Final = 0x18538067
_CLUSTER: Final = 0x1F43B675

_PAGE_HEADER: Final = 27
_PAGE_FLAGS: Final = 5
_PAGE_SEGMENTS: Final = 26
_LAST_PAGE: Final = 4


def check_complete(form: Format, data: bytes) -> None:
    """Raise MediaError at a sound or video file that ends before its own end.

    What follows the end is not looked at.  Of flac and mp3 nothing is known before they are decoded.
    """
    checks = {"wav": _check_wav, "aac": _check_aac, "mp4": _check_mp4, "webm": _check_webm, "ogg": _check_ogg}
    check = checks.get(form)
    if check is not None:
        check(data)


def cut_short(what: str) -> MediaError:
    """The refusal of a file that ends too early."""
    return MediaError(f"the file is cut short: {what}; send it whole")


def _check_length(what: str, length: int, there: int) -> None:
    if length > there:
        raise cut_short(f"of the {length} bytes of its {what} there are {there}")


def _check_wav(data: bytes) -> None:
    """Up to the chunk with the samples."""
    position, name = _RIFF_HEADER, b""
    while name != b"data" and position + _CHUNK.size <= len(data):
        name, length = _CHUNK.unpack_from(data, position)
        position += _CHUNK.size
        if name != b"data" or 0 < length < _LENGTH_UNKNOWN:
            _check_length("samples" if name == b"data" else "header", length, len(data) - position)
        position += length + length % 2


def _check_aac(data: bytes) -> None:
    """Frame by frame."""
    position = tags_length(data)
    while (length := frame_length(data, position)) is not None:
        _check_length("last frame", length, len(data) - position)
        position += length
    if is_sync(data, position) and len(data) - position < HEADER:
        raise cut_short("the header of its last frame is not whole")


def _check_mp4(data: bytes) -> None:
    """Box by box (ISO 14496-12, 4.2)."""
    position = 0
    while position + _BOX.size <= len(data):
        length, name = _BOX.unpack_from(data, position)
        if length == 1 and position + _BOX.size + _BOX_LENGTH.size <= len(data):
            (length,) = _BOX_LENGTH.unpack_from(data, position + _BOX.size)
        if length < _BOX.size or (name not in _BOXES and position + length > len(data)):
            # A box up to the end has length 0.  Everything else is no box of this file's.
            return
        _check_length(f"box {name.decode('ascii', 'replace')}", length, len(data) - position)
        position += length


def _check_webm(data: bytes) -> None:
    """Element by element (RFC 8794); browsers leave the lengths of the segment and of clusters open."""
    position, end = 0, len(data)
    while position < end:
        identifier, _, start = _read_vint(data, position)
        marked, bits, start = _read_vint(data, start)
        length = marked & (1 << bits) - 1
        unknown = length == (1 << bits) - 1
        if not bits or (unknown and identifier not in (_SEGMENT, _CLUSTER)):
            return
        if not unknown:
            _check_length("segment" if identifier == _SEGMENT else "clusters", length, end - start)
        if identifier == _SEGMENT and not unknown:
            end = start + length
        position = start if unknown or identifier == _SEGMENT else start + length


def _read_vint(data: bytes, start: int) -> tuple[int, int, int]:
    """A number with its length marker, its bits besides the marker (0: no number), and where it ends."""
    first = data[start] if start < len(data) else 0
    length = 9 - first.bit_length()
    if not first or start + length > len(data):
        return 0, 0, start
    return int.from_bytes(data[start : start + length], "big"), 7 * length, start + length


def _check_ogg(data: bytes) -> None:
    """The last page (RFC 3533, 6): it must be there to its end, and say that it is the last."""
    page = data.rfind(b"OggS")
    header = data[page : page + _PAGE_HEADER]
    if len(header) < _PAGE_HEADER or not header[_PAGE_FLAGS] & _LAST_PAGE:
        raise cut_short("the page that ends it is not there")
    body = page + _PAGE_HEADER + header[_PAGE_SEGMENTS]
    _check_length("last page", sum(data[page + _PAGE_HEADER : body]), len(data) - body)

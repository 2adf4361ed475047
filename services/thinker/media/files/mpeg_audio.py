"""What must be known of mp3 files and AAC's ADTS frames before FFmpeg reads them: tags, frames, lengths."""

import struct
from typing import Final

_TAG_HEADER: Final = 10
_TAG_HAS_FOOTER: Final = 0x10
_XING_OFFSETS: Final = (13, 21, 36)
"""Behind the side information of the first frame, whose length depends on version and channels."""
_XING_HAS_FRAMES: Final = 1
_VBRI: Final = struct.Struct(">4s10xI")
_VBRI_OFFSET: Final = 36


def tags_length(data: bytes) -> int:
    """Bytes of the ID3v2 tags that the data begin with (id3.org/id3v2.4.0-structure)."""
    start = 0
    while data[start : start + 3] == b"ID3" and len(data) >= start + _TAG_HEADER:
        size = 0
        for byte in data[start + 6 : start + _TAG_HEADER]:
            size = size << 7 | byte & 0x7F
        footer = _TAG_HEADER if data[start + 5] & _TAG_HAS_FOOTER else 0
        start += _TAG_HEADER + size + footer
    return start


def is_frame(data: bytes, start: int = 0) -> bool:
    """Whether the header of an MPEG audio frame of layer III stands here (ISO 11172-3, 2.4.1.3)."""
    header = data[start : start + 4]
    return (
        len(header) == 4
        and header[0] == 0xFF
        and header[1] & 0xE0 == 0xE0
        and header[1] >> 3 & 3 != 1
        and header[1] >> 1 & 3 == 1
        and header[2] >> 4 not in (0, 15)
        and header[2] >> 2 & 3 != 3
    )


def declared_frames(data: bytes) -> int | None:
    """The number of frames that the encoder's own frame at the front declares, if there is one."""
    start = tags_length(data)
    for offset in _XING_OFFSETS:
        name, flags, frames = struct.unpack(
            ">4sII", data[start + offset : start + offset + 12].ljust(12, b"\0")
        )
        if name in (b"Xing", b"Info") and flags & _XING_HAS_FRAMES:
            return int(frames)
    first = start + _VBRI_OFFSET
    name, frames = _VBRI.unpack(data[first : first + _VBRI.size].ljust(_VBRI.size, b"\0"))
    return int(frames) if name == b"VBRI" else None


HEADER: Final = 7
"""Bytes of a frame's header, without its checksum."""
_WITH_CHECKSUM: Final = 9
_RATES: Final = 13
"""Sampling rates that a header can name."""


def frame_length(data: bytes, start: int = 0) -> int | None:
    """Bytes of the frame that begins here, its header included; none if none does (ISO 13818-7, 6.2)."""
    header = data[start : start + HEADER]
    if len(header) < HEADER or not is_sync(header) or header[2] >> 2 & 15 >= _RATES:
        return None
    length = (header[3] & 3) << 11 | header[4] << 3 | header[5] >> 5
    return length if length >= (HEADER if header[1] & 1 else _WITH_CHECKSUM) else None


def is_sync(data: bytes, start: int = 0) -> bool:
    """Whether the two bytes stand here that every frame begins with; other layers are those of MPEG audio."""
    return data[start : start + 1] == b"\xff" and (*data[start + 1 : start + 2], 0)[0] & 0xF6 == 0xF0


def is_adts(data: bytes, start: int = 0) -> bool:
    """Whether a frame begins here, and another one behind it, as far as there are bytes."""
    length = frame_length(data, start)
    return length is not None and (len(data) - start <= length or is_sync(data, start + length))

"""What must be known of AAC in ADTS frames before FFmpeg reads it: where each frame ends."""

from typing import Final

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

"""How mp3 files and AAC's ADTS frames are told apart, which have no signature: by tags and frames."""

from typing import Final

_TAG_HEADER: Final = 10
_TAG_HAS_FOOTER: Final = 0x10


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


def is_adts(data: bytes, start: int = 0) -> bool:
    """Whether the header of an ADTS frame begins here (ISO 13818-7, 6.2); other layers are MPEG audio's."""
    return data[start : start + 1] == b"\xff" and (*data[start + 1 : start + 2], 0)[0] & 0xF6 == 0xF0

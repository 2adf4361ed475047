"""Finds out what a file is from its first bytes.

Names and media types are not asked: they come from outside.  FFmpeg is not asked either: left to guess, it
takes playlists and other texts that name further files.
"""

from typing import Final, Literal

from omnirelay.errors import MediaError
from shared.messages import MediaKind

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


Format = Literal["wav", "flac", "ogg", "mp3", "aac", "mp4", "webm", "png", "jpeg", "webp", "gif", "bmp"]
"""mp4 stands for its whole family (m4a, mov, 3gp), webm for all of Matroska, aac for ADTS frames in a row."""

DEMUXERS: Final[dict[Format, str]] = {
    "wav": "wav",
    "flac": "flac",
    "ogg": "ogg",
    "mp3": "mp3",
    "aac": "aac",
    "mp4": "mp4",
    "webm": "matroska",
}
"""FFmpeg's demuxer of each format that may hold sound."""

_TAKEN: Final[dict[MediaKind, tuple[tuple[Format, ...], str]]] = {
    "audio": (tuple(DEMUXERS), "wav, flac, ogg, mp3, aac, m4a, webm"),
    "image": (("png", "jpeg", "webp", "gif", "bmp"), "png, jpeg, webp, gif, bmp"),
    "video": (("mp4", "webm", "gif", "png", "webp"), "mp4, mov, webm, mkv, animated gif, png, webp"),
}

_SIGNATURES: Final[tuple[tuple[Format, int, bytes, bytes], ...]] = (
    ("wav", 8, b"RIFF", b"WAVE"),
    ("wav", 8, b"RF64", b"WAVE"),
    ("webp", 8, b"RIFF", b"WEBP"),
    ("flac", 0, b"", b"fLaC"),
    ("ogg", 0, b"", b"OggS"),
    ("webm", 0, b"", b"\x1a\x45\xdf\xa3"),
    ("png", 0, b"", b"\x89PNG\r\n\x1a\n"),
    ("jpeg", 0, b"", b"\xff\xd8\xff"),
    ("bmp", 0, b"", b"BM"),
    ("gif", 0, b"", b"GIF87a"),
    ("gif", 0, b"", b"GIF89a"),
    # The first box of a file: its type, and in mov files of old what may stand before it.
    *(("mp4", 4, b"", box) for box in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")),
)
"""Format, and what stands where: a beginning, then a signature at an offset."""


def check_format(kind: MediaKind, data: bytes) -> Format:
    """The format of an item, by its beginning with all tags; raises MediaError if its kind has another."""
    if not data:
        raise MediaError("the file is empty")
    formats, names = _TAKEN[kind]
    found = _find_format(data)
    if found is None or found not in formats:
        raise MediaError(f"this is none of {names}" + (f", but {found}" if found else ""))
    return found


def _find_format(data: bytes) -> Format | None:
    for form, offset, beginning, signature in _SIGNATURES:
        if data.startswith(beginning) and data.startswith(signature, offset):
            return form
    if data.startswith(b"ID3"):
        # Some programs put the tags of mp3 before flac and aac too.
        behind = tags_length(data)
        if data.startswith(b"fLaC", behind):
            return "flac"
        return "aac" if is_adts(data, behind) else "mp3"
    if is_adts(data):
        return "aac"
    return "mp3" if is_frame(data) else None

"""How long each frame of an animation is shown, from the file's structure.

Pillow tells this too, but decodes every frame for it.
"""

import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from services.thinker.media.files.complete import cut_short
from services.thinker.media.files.formats import Format

_UNDECLARED: Final = Fraction(1, 10)
"""How long browsers show a frame whose duration is 0."""

_PNG_SIGNATURE: Final = 8
_PNG_CHUNK: Final = struct.Struct(">I4s")
_PNG_CHECKSUM: Final = 4
_PNG_DELAY: Final = struct.Struct(">20xHH")
_RIFF_HEADER: Final = 12
_RIFF_CHUNK: Final = struct.Struct("<4sI")
_GIF_HEADER: Final = 13
_GIF_FRAME: Final = 10


def frame_durations(data: bytes, form: Format) -> list[Fraction]:
    """Durations of all frames, in seconds; raises MediaError if the file is cut short."""
    durations = {"png": _png, "webp": _webp, "gif": _gif}[form]
    try:
        return [duration or _UNDECLARED for duration in durations(data)]
    except (IndexError, struct.error) as error:
        raise cut_short("its structure breaks off") from error


def _png(data: bytes) -> Iterator[Fraction]:
    """Of the fcTL chunks (PNG third edition, 11.3.6.2)."""
    position, name = _PNG_SIGNATURE, b""
    while name != b"IEND":
        length, name = _PNG_CHUNK.unpack_from(data, position)
        position += _PNG_CHUNK.size
        if name == b"fcTL":
            numerator, denominator = _PNG_DELAY.unpack_from(data, position)
            yield Fraction(numerator, denominator or 100)
        position += length + _PNG_CHECKSUM


def _webp(data: bytes) -> Iterator[Fraction]:
    """Of the ANMF chunks (RFC 9649, 2.7.1.1)."""
    end = _RIFF_HEADER - 4 + int.from_bytes(data[4:8], "little")
    position = _RIFF_HEADER
    while position < end:
        name, length = _RIFF_CHUNK.unpack_from(data, position)
        position += _RIFF_CHUNK.size
        if name == b"ANMF":
            yield Fraction(int.from_bytes(data[position + 12 : position + 15], "little"), 1000)
        position += length + length % 2


def _gif(data: bytes) -> Iterator[Fraction]:
    """Of the graphic control extensions (GIF89a, 23)."""
    position = _GIF_HEADER + _colours(data[10])
    delay = 0
    while (block := data[position]) != ord(";"):
        if block == ord("!"):
            if data[position + 1] == 0xF9:
                delay = int.from_bytes(data[position + 4 : position + 6], "little")
            position += 2
        elif block == ord(","):
            yield Fraction(delay, 100)
            delay = 0
            position += _GIF_FRAME + _colours(data[position + _GIF_FRAME - 1]) + 1
        else:
            # Pillow passes over what is no block.
            position += 1
            continue
        while data[position]:
            position += 1 + data[position]
        position += 1


def _colours(flags: int) -> int:
    """Bytes of a colour table."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0

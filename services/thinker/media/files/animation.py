"""Animated pictures as videos, through Pillow.

Durations are read from the file's structure: for them Pillow decodes every frame.
"""

import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omnirelay.errors import MediaError
from services.thinker.media.decoded import Pixels
from services.thinker.media.files.complete import cut_short
from services.thinker.media.files.formats import Format
from services.thinker.media.files.image import open_picture
from services.thinker.media.files.sampling import check_rate, fit_frames, sample_frames
from services.thinker.media.limits import MAX_FRAME_RATE, DecodeLimits

_SHORTEST: Final = Fraction(1, MAX_FRAME_RATE)


def decode_animation(data: bytes, form: Format, limits: DecodeLimits) -> Pixels:
    """Decode the sampled frames of a png, gif or webp, ``[t, height, width, 3]``, uint8, RGB.

    A frame counts as often as it lasts longer than the shortest one: programs write a long frame for several
    that are equal.  Frames that would have more than ``limits.max_decoded_bytes`` together are scaled down.
    Raises MediaError if it is damaged, cut short, too small or no animation, MediaTooLargeError if it is too
    large or too long.
    """
    with open_picture(data, limits) as image:
        frames = getattr(image, "n_frames", 1)
        if frames < 2:
            raise MediaError("it is a still picture, not a video")
        durations = frame_durations(data, form)
        # An animated png may begin with a picture for programs that know no animations.
        skipped = 1 if getattr(image, "default_image", False) else 0
        if len(durations) != frames - skipped:
            raise cut_short(f"of {frames - skipped} frames there are {len(durations)}")
        return _decode(image, skipped, _choose(durations, limits), limits)


def _choose(durations: list[Fraction], limits: DecodeLimits) -> NDArray[np.int64]:
    """The frames to take, in order; one that is shown for long may be there several times."""
    seconds = sum(durations, Fraction(0))
    check_rate(len(durations), len(durations) / float(seconds), limits)
    shortest = max(min(durations), _SHORTEST)
    total = round(seconds / shortest)
    ends = np.cumsum([float(duration) for duration in durations])
    moments = (sample_frames(total, float(total / seconds), limits) + 0.5) * float(shortest)
    return np.minimum(np.searchsorted(ends, moments, side="right"), len(durations) - 1)


def _decode(image: Image.Image, skipped: int, wanted: NDArray[np.int64], limits: DecodeLimits) -> Pixels:
    size = fit_frames(len(wanted), *image.size, limits)
    frames = np.empty((len(wanted), size[1], size[0], 3), np.uint8)
    # Frames are changes of the one before: all of them are decoded.
    for number in range(int(wanted[-1]) + 1):
        image.seek(number + skipped)
        # Those of a gif may lie outside of the picture and make it larger.
        limits.check_sides(*image.size)
        image.load()
        places = np.flatnonzero(wanted == number)
        if places.size:
            frame = image.convert("RGB")
            frames[places] = np.asarray(frame if frame.size == size else frame.resize(size))
    return frames


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

"""Pictures, through Pillow."""

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Final

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media.decoded import DecodeLimits, Pixels

_FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_UNREADABLE: Final = (
    *(OSError, SyntaxError, ValueError, LookupError, ArithmeticError, EOFError, TypeError, AttributeError),
    *(RuntimeError, struct.error, zlib.error),
)
"""What Pillow raises for data that it cannot make sense of, and what escapes it."""

_WEBP_HEADER: Final = 30
_14_BITS: Final = (1 << 14) - 1
_16_BITS_A_STEP: Final = 257
"""Steps of 16 bits in one of 8 bits: 65535 is 255."""

# Sizes are checked here, before anything is decompressed.
Image.MAX_IMAGE_PIXELS = None


@contextmanager
def open_picture(data: bytes, limits: DecodeLimits) -> Iterator[Image.Image]:
    """Open a picture or animation, and turn what Pillow raises within into the refusal of the file.

    Raises MediaError at damage or a small side, MediaTooLargeError at too many pixels.
    """
    try:
        if size := _webp_size(data):
            limits.check_sides(*size)
        with Image.open(BytesIO(data), formats=_FORMATS) as image:
            limits.check_sides(*image.size)
            yield image
    except UnidentifiedImageError as error:
        raise MediaError("the file is damaged or cut short at its beginning") from error
    except _UNREADABLE as error:
        raise MediaError(
            f"the file is damaged or cut short (Pillow: {error or type(error).__name__})"
        ) from error


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a webp file (RFC 9649, 2.5 to 2.7); its decoder takes memory when it is opened."""
    match data[12:16] if data[8:12] == b"WEBP" and len(data) >= _WEBP_HEADER else b"":
        case b"VP8X":
            return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
        case b"VP8L":
            sides = int.from_bytes(data[21:25], "little")
            return 1 + (sides & _14_BITS), 1 + (sides >> 14 & _14_BITS)
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", data, 26)
            return width & _14_BITS, height & _14_BITS
    return None


def decode_image(data: bytes, limits: DecodeLimits) -> Pixels:
    """Decode a picture, of an animation the first frame, ``[height, width, 3]``, uint8, RGB.

    Turned upright and made RGB as transformers' ``load_image`` does it, but for 16-bit greys, which Pillow
    clips at 255: they are scaled.  Errors are :func:`open_picture`'s.
    """
    with open_picture(data, limits) as image:
        needed = 3 * image.width * image.height
        if needed > limits.max_decoded_bytes:
            raise MediaTooLargeError(
                f"it has {needed:,} bytes when it is decoded; at most {limits.max_decoded_bytes:,} are taken"
            )
        ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I;16"):
            grey = np.rint(np.asarray(image) / _16_BITS_A_STEP).astype(np.uint8)
            return np.repeat(grey[:, :, None], 3, axis=2)
        return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))

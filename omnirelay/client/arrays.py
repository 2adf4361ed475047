"""Samples, pixels and frames as lossless files: WAV, PNG and animated PNG; needs NumPy."""

import io
import operator
import struct
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from omnirelay.errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_CHANNELS: Final = 32
COMPRESSION: Final = 1
"""zlib's fastest level."""
MAX_APNG_NUMBER: Final = 2**16 - 1
_UP: Final = 2
"""PNG's filter that stores a row as its difference from the one above."""
_WAV_PCM, _WAV_FLOAT = 1, 3
_PNG_MODES = ("1", "L", "LA", "I;16", "I;16B", "P", "RGB", "RGBA")
"""PIL modes kept as they are; others become RGB."""
_RANGELESS_MODES = ("I", "F")
"""PIL modes without a defined white."""


def wav(samples: npt.NDArray[Any], sampling_rate: int) -> bytes:
    """Encode samples, ``[n]`` or ``[n, channels]``, int16 or floating point, as WAV.

    Raises:
        MediaError: They are something else, or do not fit the format.
    """
    channels = samples.shape[1] if samples.ndim == 2 else 1
    if samples.ndim not in (1, 2) or not samples.size or channels > MAX_CHANNELS:
        raise MediaError(
            f"samples must be [n] or [n, channels] with up to {MAX_CHANNELS} channels, "
            f"not {list(samples.shape)}"
        )
    if samples.dtype != np.int16 and samples.dtype.kind != "f":
        raise MediaError(f"samples must be int16 or floating point, not {samples.dtype}")
    form, dtype = (_WAV_PCM, "<i2") if samples.dtype == np.int16 else (_WAV_FLOAT, "<f4")
    with np.errstate(over="ignore"):
        data = samples.astype(dtype, copy=False)
    if not np.isfinite(data).all():
        raise MediaError("samples must be finite and fit float32")
    try:
        rate = operator.index(sampling_rate)
        width = data.dtype.itemsize
        shape = struct.pack(
            "<HHIIHHH", form, channels, rate, rate * channels * width, channels * width, 8 * width, 0
        )
        fact = struct.pack("<4sII", b"fact", 4, len(samples))
        head = struct.pack("<4sI", b"fmt ", len(shape)) + shape + fact
        riff = struct.pack("<4sI4s", b"RIFF", 4 + len(head) + 8 + data.nbytes, b"WAVE")
        start = riff + head + struct.pack("<4sI", b"data", data.nbytes)
    except (TypeError, struct.error) as error:
        raise MediaError(
            f"{sampling_rate!r} samples a second and {data.nbytes} bytes do not fit a WAV: {error}"
        ) from error
    if rate < 1:
        raise MediaError(f"sampling_rate must be positive, not {rate}")
    return b"".join([start, np.ascontiguousarray(data).data])


def png(frames: npt.NDArray[np.uint8], fps: float | None) -> bytes:
    """Encode ``[1, h, w]`` or ``[1, h, w, 3]`` as PNG, or with ``fps`` any number of frames as animated PNG.

    Not done by PIL: it merges equal frames, makes no video of one frame, and takes three times as long
    (https://www.w3.org/TR/png-3/).
    """
    height, width = frames.shape[1:3]
    colour = 2 if frames.ndim == 4 else 0
    pieces: list[bytes] = [b"\x89PNG\r\n\x1a\n"]

    def write(kind: bytes, body: bytes) -> None:
        check = zlib.crc32(body, zlib.crc32(kind))
        pieces.extend((struct.pack(">I", len(body)), kind, body, struct.pack(">I", check)))

    write(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0))
    if fps is None:
        write(b"IDAT", _deflated(frames[0]))
    else:
        delay = _delay(fps)
        write(b"acTL", struct.pack(">II", len(frames), 0))
        for number, frame in enumerate(frames):
            # Controls and data share one counter: control 0, control 1, data 2, control 3, data 4, …
            control = max(2 * number - 1, 0)
            place = struct.pack(">IIIII", control, width, height, 0, 0)
            write(b"fcTL", place + struct.pack(">HHBB", delay.numerator, delay.denominator, 0, 0))
            data = _deflated(frame)
            if number:
                write(b"fdAT", struct.pack(">I", control + 1) + data)
            else:
                write(b"IDAT", data)
    write(b"IEND", b"")
    return b"".join(pieces)


def png_of(picture: "Image") -> bytes:
    """Encode a PIL image as PNG.

    Raises:
        MediaError: It cannot be read, or its mode has no defined range.
    """
    target = io.BytesIO()
    kept = picture if picture.mode in _PNG_MODES else _in_rgb(picture)
    try:
        kept.save(target, "PNG", compress_level=COMPRESSION)
    except (OSError, ValueError) as error:
        # PIL reads a file lazily, and writes no empty one.
        raise MediaError(f"the image cannot be read: {error}") from error
    return target.getvalue()


def stacked(pictures: "Sequence[Image]") -> npt.NDArray[np.uint8]:
    """Stack PIL images of one size into frames, uint8 ``[frames, h, w, 3]``.

    Raises:
        MediaError: Their sizes differ, or one cannot be read.
    """
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise MediaError(f"the frames of a video must have one size, not {len(sizes)} different ones")
    return np.stack([np.asarray(_in_rgb(picture)) for picture in pictures])


def check_pixels(pixels: npt.NDArray[Any], shaped: bool, shape: str) -> None:
    """Reject anything but a uint8 array of the given shape.

    Raises:
        MediaError: It is something else.
    """
    if pixels.dtype != np.uint8 or not shaped or not pixels.size:
        raise MediaError(f"pixels must be uint8 {shape}, not {pixels.dtype} {list(pixels.shape)}")


def _in_rgb(picture: "Image") -> "Image":
    if picture.mode in _RANGELESS_MODES:
        raise MediaError(f"an image of PIL's mode {picture.mode} has no defined range: convert it first")
    try:
        return picture.convert("RGB")
    except (OSError, ValueError) as error:
        raise MediaError(f"the image cannot be read: {error}") from error


def _deflated(pixels: npt.NDArray[np.uint8]) -> bytes:
    rows = pixels.reshape(pixels.shape[0], -1)
    filtered = np.empty((rows.shape[0], 1 + rows.shape[1]), np.uint8)
    filtered[:, 0] = _UP
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    return zlib.compress(filtered.data, COMPRESSION)


def _delay(fps: float) -> Fraction:
    """Seconds per frame, as a fraction that APNG can hold."""
    if not 1 / MAX_APNG_NUMBER <= fps <= MAX_APNG_NUMBER:
        raise MediaError(f"fps must be from 1/{MAX_APNG_NUMBER} to {MAX_APNG_NUMBER}, not {fps}")
    return 1 / Fraction(fps).limit_denominator(int(MAX_APNG_NUMBER / max(fps, 1)))

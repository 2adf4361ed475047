"""Sounds, pictures and videos for a request, from what a program has of them.

A path, bytes or an address is sent as it is.  What is only numbers yet is written without loss: sounds as
WAV, pictures as PNG, frames as animated PNG, compressed little, because the gateway is usually near.
"""

import io
import operator
import struct
import sys
import zlib
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar, Union

import numpy as np
import numpy.typing as npt

from gateway.parts import AudioPart, ContentPart, ImagePart, MediaPart, TextPart, VideoPart
from shared.errors import MediaError
from shared.messages import MediaKind

if TYPE_CHECKING:
    from PIL.Image import Image

File = str | Path | bytes | bytearray | memoryview
"""A path, a ``data:`` or ``https:`` URL, or the bytes of a file."""
AudioSource = File | npt.NDArray[Any] | AudioPart
ImageSource = Union[File, npt.NDArray[np.uint8], "Image", ImagePart]
VideoSource = File | npt.NDArray[np.uint8] | Sequence["Image"] | VideoPart

MAX_FILE_BYTES: Final = 2**30
"""Of a file that is read: more than a gateway takes, and an end for devices that have none."""
MAX_CHANNELS: Final = 32
COMPRESSION: Final = 1
"""zlib's level for PNG: the fastest."""
MAX_APNG_NUMBER: Final = 2**16 - 1
_UP: Final = 2
"""PNG's filter that keeps a row as its difference from the one above."""
_WAV_PCM, _WAV_FLOAT = 1, 3
_PNG_MODES = ("1", "L", "LA", "I;16", "I;16B", "P", "RGB", "RGBA")
"""Of PIL; others become RGB."""
_RANGELESS_MODES = ("I", "F")
"""Of PIL: nobody knows which of their numbers is white."""

P = TypeVar("P", bound=MediaPart)


def audio(source: AudioSource, sampling_rate: int | None = None) -> AudioPart:
    """Make the part of a message that is a sound.

    Args:
        source: A path, URL, the bytes of a file, or samples: ``[n]`` or ``[n, channels]``, int16 or floating
            point in [-1, 1].  Samples become WAV: int16 as it is, float32 as it is, other floating point
            as float32.
        sampling_rate: Samples a second; for samples, and only for them.

    Raises:
        MediaError: It cannot be read, or is not one of these.
    """
    if isinstance(source, np.ndarray):
        if sampling_rate is None:
            raise MediaError("samples need their sampling_rate")
        return AudioPart(data=memoryview(_wav(source, sampling_rate)))
    _refuse(sampling_rate, "sampling_rate is for samples; a file says its own")
    return _from_file(AudioPart, source)


def image(source: ImageSource) -> ImagePart:
    """Make the part of a message that is a picture.

    Args:
        source: A path, URL, the bytes of a file, a PIL image, or pixels: uint8 ``[h, w, 3]`` (RGB) or
            ``[h, w]`` (grey).

    Raises:
        MediaError: It cannot be read, or is not one of these.
    """
    if isinstance(source, np.ndarray):
        _check_pixels(source, source.ndim == 2 or (source.ndim == 3 and source.shape[2] == 3), "[h, w, 3]")
        return ImagePart(data=memoryview(_png(source[np.newaxis], None)))
    if _is_image(source):
        return ImagePart(data=memoryview(_png_of(source)))
    return _from_file(ImagePart, source)


def video(source: VideoSource, fps: float | None = None) -> VideoPart:
    """Make the part of a message that is a video.

    Args:
        source: A path, URL, the bytes of a file, or frames: PIL images of one size, or uint8
            ``[frames, h, w, 3]`` (RGB).
        fps: Frames a second; for frames, and only for them.

    Raises:
        MediaError: It cannot be read, or is not one of these.
    """
    frames = _stacked(source) if _is_images(source) else source
    if isinstance(frames, np.ndarray):
        _check_pixels(frames, frames.ndim == 4 and frames.shape[3] == 3, "[frames, h, w, 3]")
        if fps is None:
            raise MediaError("frames need their fps")
        return VideoPart(data=memoryview(_png(frames, fps)))
    _refuse(fps, "fps is for frames; a file says its own")
    return _from_file(VideoPart, source)


def content(
    text: str,
    audios: AudioSource | Sequence[AudioSource] = (),
    images: ImageSource | Sequence[ImageSource] = (),
    videos: VideoSource | Sequence[VideoSource] = (),
) -> str | list[ContentPart]:
    """Give what one message holds: sounds, pictures, videos, and then the text.

    Raises:
        MediaError: Naming the item that cannot be used.
    """
    parts: list[ContentPart] = [
        *_each("audio", audio, audios),
        *_each("image", image, images),
        *_each("video", video, videos),
    ]
    if not parts:
        return text
    return [*parts, TextPart(text)] if text else parts


def _each(kind: MediaKind, make: Any, sources: Any) -> Iterable[ContentPart]:
    """Make a part of each source; the one or the many that were given."""
    many = isinstance(sources, list | tuple) and not (kind == "video" and _is_images(sources))
    for number, source in enumerate(sources if many else [sources], 1):
        try:
            yield make(source)
        except MediaError as error:
            raise MediaError(f"{kind} {number}: {error}") from error


def _from_file(kind: type[P], source: object) -> P:
    if isinstance(source, kind):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return kind(data=memoryview(source).cast("B"))
    if isinstance(source, str) and source[:6].lower().startswith(("data:", "https:")):
        return kind(url=source)
    if isinstance(source, str) and source[:5].lower() == "http:":
        raise MediaError(f"{source[:64]}: gateways fetch by https: only")
    if isinstance(source, str | Path):
        return kind(data=memoryview(_read(Path(source))))
    raise MediaError(f"{type(source).__name__} is nothing that {kind.__name__} can be made of")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        # ValueError: a zero byte in the path.
        reason = error.strerror if isinstance(error, OSError) else error
        raise MediaError(f"cannot read {path}: {reason}") from error
    if not data:
        raise MediaError(f"{path} is empty")
    if len(data) > MAX_FILE_BYTES:
        raise MediaError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return data


def _refuse(value: object, why: str) -> None:
    if value is not None:
        raise MediaError(why)


def _is_image(source: object) -> "TypeGuard[Image]":
    """A PIL image; who has one has loaded the library, which is not loaded here."""
    library = sys.modules.get("PIL.Image")
    return library is not None and isinstance(source, library.Image)


def _is_images(source: object) -> "TypeGuard[Sequence[Image]]":
    return isinstance(source, list | tuple) and bool(source) and all(map(_is_image, source))


def _png_of(picture: "Image") -> bytes:
    target = io.BytesIO()
    kept = picture if picture.mode in _PNG_MODES else _in_rgb(picture)
    try:
        kept.save(target, "PNG", compress_level=COMPRESSION)
    except OSError as error:
        # PIL opens a file and reads it later.
        raise MediaError(f"the picture cannot be read: {error}") from error
    return target.getvalue()


def _in_rgb(picture: "Image") -> "Image":
    if picture.mode in _RANGELESS_MODES:
        raise MediaError(f"a picture of PIL's mode {picture.mode} has no set range: convert it first")
    try:
        return picture.convert("RGB")
    except (OSError, ValueError) as error:
        raise MediaError(f"the picture cannot be read: {error}") from error


def _stacked(pictures: "Sequence[Image]") -> npt.NDArray[np.uint8]:
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        raise MediaError(f"the frames of a video must have one size, not {len(sizes)} different ones")
    return np.stack([np.asarray(_in_rgb(picture)) for picture in pictures])


def _check_pixels(pixels: npt.NDArray[Any], shaped: bool, shape: str) -> None:
    if pixels.dtype != np.uint8 or not shaped or not pixels.size:
        raise MediaError(f"pixels must be uint8 {shape}, not {pixels.dtype} {list(pixels.shape)}")


def _png(frames: npt.NDArray[np.uint8], fps: float | None) -> bytes:
    """Write a PNG of ``[1, h, w]`` or ``[1, h, w, 3]``, animated with ``fps`` and any number of frames.

    Not left to PIL, which makes one frame of equal ones and no video of one frame, and takes three times as
    long (https://www.w3.org/TR/png-3/).
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
            # Frame controls and data share one count: control 0, control 1, data 2, control 3, data 4, …
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


def _deflated(pixels: npt.NDArray[np.uint8]) -> bytes:
    rows = pixels.reshape(pixels.shape[0], -1)
    filtered = np.empty((rows.shape[0], 1 + rows.shape[1]), np.uint8)
    filtered[:, 0] = _UP
    filtered[0, 1:] = rows[0]
    np.subtract(rows[1:], rows[:-1], out=filtered[1:, 1:])
    return zlib.compress(filtered.data, COMPRESSION)


def _delay(fps: float) -> Fraction:
    """Seconds from frame to frame, in the numbers that APNG has."""
    if not 1 / MAX_APNG_NUMBER <= fps <= MAX_APNG_NUMBER:
        raise MediaError(f"fps must be from 1/{MAX_APNG_NUMBER} to {MAX_APNG_NUMBER}, not {fps}")
    return 1 / Fraction(fps).limit_denominator(int(MAX_APNG_NUMBER / max(fps, 1)))


def _wav(samples: npt.NDArray[Any], sampling_rate: int) -> bytes:
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
        raise MediaError("samples must be finite, and fit float32")
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

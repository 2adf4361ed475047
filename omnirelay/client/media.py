"""Media parts of a request, from paths, bytes, URLs, arrays or PIL images.

Files are sent as they are.  Arrays are encoded losslessly, with little compression because the gateway is
usually near: samples as WAV, pixels as PNG, frames as animated PNG.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeGuard, TypeVar, Union

from omnirelay.content import AudioPart, ContentPart, ImagePart, MediaPart, TextPart, VideoPart
from omnirelay.errors import MediaError, MissingPackageError
from omnirelay.values import MediaKind

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

File = str | Path | bytes | bytearray | memoryview
"""A path, a ``data:`` or ``https:`` URL, or the bytes of a file."""
AudioSource = Union[File, "npt.NDArray[Any]", AudioPart]
ImageSource = Union[File, "npt.NDArray[np.uint8]", "Image", ImagePart]
VideoSource = Union[File, "npt.NDArray[np.uint8]", Sequence["Image"], VideoPart]

MAX_FILE_BYTES: Final = 2**30
"""Limit of what is read from a path: more than a gateway takes; devices have no end of file."""
P = TypeVar("P", bound=MediaPart)


def audio(source: AudioSource, sampling_rate: int | None = None) -> AudioPart:
    """Make an audio part.

    Args:
        source: A path, URL, bytes of a file, or samples: ``[n]`` or ``[n, channels]``, int16 or floating
            point in [-1, 1].  Samples are sent as WAV, floating point as float32.
        sampling_rate: Samples per second; required for samples, not allowed for files.

    Raises:
        MediaError: The source cannot be read or is of another kind.
    """
    if _is_array(source):
        if sampling_rate is None:
            raise MediaError("samples need a sampling_rate")
        return AudioPart(data=memoryview(_arrays().wav(source, sampling_rate)))
    if sampling_rate is not None:
        raise MediaError("sampling_rate is for samples; a file has its own")
    return _from_file(AudioPart, source)


def image(source: ImageSource) -> ImagePart:
    """Make an image part.

    Args:
        source: A path, URL, bytes of a file, PIL image, or uint8 ``[h, w, 3]`` (RGB) or ``[h, w]`` (grey).

    Raises:
        MediaError: The source cannot be read or is of another kind.
    """
    if _is_array(source):
        _arrays().check_pixels(
            source, source.ndim == 2 or (source.ndim == 3 and source.shape[2] == 3), "[h, w, 3]"
        )
        return ImagePart(data=memoryview(_arrays().png(source[None], None)))
    if _is_image(source):
        return ImagePart(data=memoryview(_arrays().png_of(source)))
    return _from_file(ImagePart, source)


def video(source: VideoSource, fps: float | None = None) -> VideoPart:
    """Make a video part.

    Args:
        source: A path, URL, bytes of a file, or frames: PIL images of one size, or uint8
            ``[frames, h, w, 3]`` (RGB).
        fps: Frames per second; required for frames, not allowed for files.

    Raises:
        MediaError: The source cannot be read or is of another kind.
    """
    frames = _arrays().stacked(source) if _is_images(source) else source
    if _is_array(frames):
        _arrays().check_pixels(frames, frames.ndim == 4 and frames.shape[3] == 3, "[frames, h, w, 3]")
        if fps is None:
            raise MediaError("frames need an fps")
        return VideoPart(data=memoryview(_arrays().png(frames, fps)))
    if fps is not None:
        raise MediaError("fps is for frames; a file has its own")
    return _from_file(VideoPart, source)


def content(
    text: str,
    audios: AudioSource | Sequence[AudioSource] = (),
    images: ImageSource | Sequence[ImageSource] = (),
    videos: VideoSource | Sequence[VideoSource] = (),
) -> str | list[ContentPart]:
    """The content of one message: audio, images, videos, then the text.

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
    """Make a part of each source; a single source need not be in a list."""
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
        raise MediaError(f"{source[:64]}: gateways fetch https: URLs only")
    if isinstance(source, str | Path):
        return kind(data=memoryview(_read(Path(source))))
    raise MediaError(f"{kind.__name__} cannot be made from {type(source).__name__}")


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


def _is_image(source: object) -> "TypeGuard[Image]":
    """Whether it is a PIL image, without importing PIL: whoever has an image has imported it."""
    library = sys.modules.get("PIL.Image")
    return library is not None and isinstance(source, library.Image)


def _is_images(source: object) -> "TypeGuard[Sequence[Image]]":
    return isinstance(source, list | tuple) and bool(source) and all(map(_is_image, source))


def _is_array(source: object) -> "TypeGuard[npt.NDArray[Any]]":
    """Whether it is a NumPy array; as with PIL."""
    library = sys.modules.get("numpy")
    return library is not None and isinstance(source, library.ndarray)


def _arrays() -> ModuleType:
    try:
        from omnirelay.client import arrays  # noqa: PLC0415 - loads NumPy
    except ModuleNotFoundError as error:
        raise MissingPackageError("numpy", "numpy") from error
    return arrays

"""Animated pictures as videos, through Pillow."""

from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media.decoded import Pixels
from services.thinker.media.files.image import open_picture
from services.thinker.media.files.sampling import check_rate, fit_frames, sample_frames
from services.thinker.media.limits import MAX_FRAME_RATE, DecodeLimits, check_seconds

_SHORTEST_MS: Final = 1000 / MAX_FRAME_RATE
_UNDECLARED_MS: Final = 100
"""How long browsers show a frame whose duration is 0."""


def decode_animation(data: bytes, limits: DecodeLimits) -> Pixels:
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
        # An animated png may begin with a picture for programs that know no animations.
        skipped = 1 if getattr(image, "default_image", False) else 0
        durations = _durations(image, range(skipped, frames), limits)
        return _decode(image, skipped, _choose(durations, limits), limits)


def _durations(image: Image.Image, frames: range, limits: DecodeLimits) -> list[float]:
    """How many milliseconds each frame is shown, which Pillow knows once it has decoded it."""
    if len(frames) > (most := int(limits.max_video_seconds * (MAX_FRAME_RATE + 1))):
        raise MediaTooLargeError(f"it has {len(frames):,} frames; at most {most:,} are taken")
    durations, whole = [], 0.0
    for number in frames:
        durations.append(_show(image, number, limits))
        whole += durations[-1]
        # A long one is not decoded to its end.
        check_seconds(whole / 1000, limits.max_video_seconds, so_far=number < frames[-1])
    return durations


def _show(image: Image.Image, number: int, limits: DecodeLimits) -> float:
    """Decode a frame; gives its duration in milliseconds."""
    image.seek(number)
    # Those of a gif may lie outside of the picture and make it larger.
    limits.check_sides(*image.size)
    image.load()
    return float(image.info.get("duration", 0)) or _UNDECLARED_MS


def _choose(durations: list[float], limits: DecodeLimits) -> NDArray[np.int64]:
    """The frames to take, in order; one that is shown for long may be there several times."""
    whole = sum(durations)
    check_rate(len(durations), 1000 * len(durations) / whole, limits)
    shortest = max(min(durations), _SHORTEST_MS)
    total = round(whole / shortest)
    ends = np.cumsum(durations)
    moments = (sample_frames(total, 1000 * total / whole, limits) + 0.5) * shortest
    return np.minimum(np.searchsorted(ends, moments, side="right"), len(durations) - 1)


def _decode(image: Image.Image, skipped: int, wanted: NDArray[np.int64], limits: DecodeLimits) -> Pixels:
    size = fit_frames(len(wanted), *image.size, limits)
    frames = np.empty((len(wanted), size[1], size[0], 3), np.uint8)
    # Frames are changes of the one before: all of them are decoded.
    for number in range(int(wanted[-1]) + 1):
        _show(image, number + skipped, limits)
        places = np.flatnonzero(wanted == number)
        if places.size:
            frame = image.convert("RGB")
            frames[places] = np.asarray(frame if frame.size == size else frame.resize(size))
    return frames

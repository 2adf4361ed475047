"""Animated pictures as videos, through Pillow."""

from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from omnirelay.errors import MediaError
from services.thinker.media.decoded import Pixels
from services.thinker.media.files.complete import cut_short
from services.thinker.media.files.durations import frame_durations
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

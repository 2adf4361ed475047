"""Sounds, pictures and videos as the thinker's processor takes them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class DecodedAudio:
    """A sound: ``[n]``, float32, mono, at :attr:`DecodeLimits.sampling_rate`."""

    samples: Samples


@dataclass(frozen=True, slots=True, eq=False)
class DecodedImage:
    """A picture: ``[height, width, 3]``, uint8, RGB."""

    pixels: Pixels


@dataclass(frozen=True, slots=True, eq=False)
class DecodedVideo:
    """The sampled frames of a video, and its sound if that was asked for.

    ``[t, height, width, 3]``, uint8, RGB; t is a multiple of the temporal patch size.
    """

    frames: Pixels
    audio: Samples | None = None


Decoded = DecodedAudio | DecodedImage | DecodedVideo

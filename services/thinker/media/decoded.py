"""Sounds, pictures and videos as the thinker's processor takes them, and what they may come to."""

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from omnirelay.errors import MediaError, MediaTooLargeError

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


MAX_SIDES_RATIO: Final = 200
"""The processors of Qwen2.5-Omni refuse pictures that are longer than this (``smart_resize``)."""
MAX_FRAME_RATE: Final = 240
"""Frames a second of the fastest video, as phones film in slow motion; bounds what is demultiplexed."""

_Positive = Annotated[int, Meta(gt=0)]
_Seconds = Annotated[float, Meta(gt=0)]


class DecodeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits from the configuration, and what the checkpoint's processors want."""

    max_audio_seconds: _Seconds
    min_image_side: _Positive  # Shortest side of a picture or of a video's frames, in pixels
    max_image_pixels: _Positive  # Largest picture, and largest frame of a video
    max_video_seconds: _Seconds
    max_video_frames: _Positive  # Most after sampling
    max_decoded_bytes: _Positive  # Most of a picture's pixels or of a video's frames
    timeout_s: _Seconds  # Longest time for one item
    sampling_rate: _Positive = 16_000  # Samples a second that the audio encoder takes
    frames_per_second: _Seconds = 2.0  # Sampled from a second of video
    min_frames: _Positive = 4  # Least that are sampled of a video that has as many
    temporal_patch_size: _Positive = 2  # Sampled frames are a multiple of this

    def check_sides(self, width: int, height: int) -> None:
        """Raise MediaError at sides too short or too unequal, MediaTooLargeError at too many pixels."""
        shorter, longer = sorted((width, height))
        if shorter < self.min_image_side:
            raise MediaError(
                f"it is {width} by {height} pixels; each side must have {self.min_image_side} at least"
            )
        if width * height > self.max_image_pixels:
            raise MediaTooLargeError(
                f"it is {width} by {height} pixels, {width * height:,} in all; "
                f"at most {self.max_image_pixels:,} are taken"
            )
        if longer > MAX_SIDES_RATIO * shorter:
            raise MediaError(
                f"it is {width} by {height} pixels; one side may be {MAX_SIDES_RATIO} times the other at most"
            )


def check_seconds(seconds: float, most: float, *, so_far: bool = False) -> None:
    """Raise MediaTooLargeError at more than ``most``; ``so_far``: it may still last longer."""
    if seconds > most:
        so_far = so_far or round(seconds, 2) <= most
        length = f"more than {most:g} s" if so_far else f"{seconds:,.2f} s"
        raise MediaTooLargeError(f"it lasts {length}; at most {most:g} s are taken")

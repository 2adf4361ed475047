"""Which frames of a video are taken, and how large they may be."""

import math

import numpy as np
from numpy.typing import NDArray

from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media.limits import MAX_FRAME_RATE, MAX_SIDES_RATIO, DecodeLimits, check_seconds


def check_rate(total: int, rate: float, limits: DecodeLimits) -> None:
    """Raise MediaError at too many frames a second, MediaTooLargeError at a video that is too long."""
    if not 0 < rate < MAX_FRAME_RATE + 1:
        raise MediaError(f"it has {rate:,.1f} frames a second; at most {MAX_FRAME_RATE} are taken")
    check_seconds(total / rate, limits.max_video_seconds)


def sample_frames(total: int, rate: float, limits: DecodeLimits) -> NDArray[np.int64]:
    """Choose frames evenly, as transformers' ``Qwen2VLVideoProcessor.sample_frames`` does.

    ``[n]``, ascending indices below ``total``; n is a multiple of the temporal patch size.  Raises
    MediaError at too few frames, MediaTooLargeError at too many.
    """
    patch = limits.temporal_patch_size
    if total < patch:
        raise MediaError(f"a video must have {patch} frames at least; this one has {total}")
    wanted = max(total / rate * limits.frames_per_second, limits.min_frames)
    count = math.floor(min(wanted, total) / patch) * patch
    if count > limits.max_video_frames:
        raise MediaTooLargeError(
            f"{count} frames would be taken of it, {limits.frames_per_second:g} a second; at most "
            f"{limits.max_video_frames} may be"
        )
    # torch.arange computes in float64 and rounds to float32, which the reference then cuts to integers.
    return (np.arange(count) * (total / count)).astype(np.float32).astype(np.int64)


def fit_frames(count: int, width: int, height: int, limits: DecodeLimits) -> tuple[int, int]:
    """Width and height of sampled frames of bounded bytes; raises MediaTooLargeError if too small."""
    ratio = math.sqrt(limits.max_decoded_bytes / (3 * count * width * height))
    if ratio >= 1:
        return width, height
    fitted = math.floor(width * ratio), math.floor(height * ratio)
    if min(fitted) < limits.min_image_side or max(fitted) > MAX_SIDES_RATIO * min(fitted):
        raise MediaTooLargeError(
            f"{count} frames of {width} by {height} pixels do not fit in {limits.max_decoded_bytes:,} bytes"
        )
    return fitted

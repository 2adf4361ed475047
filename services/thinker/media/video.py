"""Videos and animated pictures: frames sampled as transformers does it, decoded one after the other."""

import math
import struct
from dataclasses import dataclass
from typing import Any, Final, Self

import av
import numpy as np
from av.packet import Packet
from av.sidedata.sidedata import Type as SideDataType
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media.container import MediaFile, cut_short, reading
from services.thinker.media.decoded import (
    MAX_FRAME_RATE,
    MAX_SIDES_RATIO,
    DecodeLimits,
    Pixels,
    check_seconds,
)
from services.thinker.media.formats import Format
from services.thinker.media.image import open_picture


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


_RATES_DIFFER: Final = 0.05
_UNDECODED: Final = 16
"""Frames that a whole file may have and a decoder not give: those that refer to frames before the first."""
_VP8_SHOWN: Final = 0x10
_MATRIX: Final = struct.Struct("=2i4x2i16x")
"""Of a display matrix as FFmpeg hands it on, what does not move or project."""


def decode_video(data: bytes, form: Format, limits: DecodeLimits) -> Pixels:
    """Decode the sampled frames of an mp4 or webm, ``[t, height, width, 3]``, uint8, RGB, upright.

    Frames that would have more than ``limits.max_decoded_bytes`` together are scaled down while they are
    decoded, all to one size that keeps the ratio of their sides.  Raises MediaError if it is damaged, cut
    short, too small, or has too few frames, MediaTooLargeError if it is too large or long.
    """
    total, rate = _measure(data, form, limits)
    check_rate(total, rate, limits)
    wanted = sample_frames(total, rate, limits)
    with MediaFile(data, form) as file:
        return decode_frames(file, wanted, total, limits)


def _measure(data: bytes, form: Format, limits: DecodeLimits) -> tuple[int, float]:
    """How many frames there are, without decoding them, and how many of them are shown in a second."""
    with MediaFile(data, form) as file:
        track = file.picture_track()
        limits.check_sides(track.width, track.height)
        check_seconds(file.declared_seconds(track) or 0.0, limits.max_video_seconds)
        total, first, last = 0, float("inf"), float("-inf")
        for packet in file.packets(track):
            if not _is_shown(packet):
                continue
            total += 1
            if packet.pts is not None and packet.time_base is not None:
                time = float(packet.pts * packet.time_base)
                first, last = min(first, time), max(last, time)
            if total > limits.max_video_seconds * (MAX_FRAME_RATE + 1):
                # Enough to be refused, whatever the rate is.
                break
        declared = float(track.average_rate or 0)
        measured = (total - 1) / (last - first) if last > first else declared
        # FFmpeg computes the rate from what a container declares, or else guesses it from the first frames.
        guessed = not track.frames and abs(declared - measured) > _RATES_DIFFER * measured
        return total, measured if guessed or not declared else declared


def _is_shown(packet: "Packet[VideoStream]") -> bool:
    if not packet.size or packet.is_discard:
        return False
    # VP8 writes frames that others refer to and nobody sees as packets of their own (RFC 6386, 9.1).
    return packet.stream.codec_context.name != "vp8" or bool(memoryview(packet)[0] & _VP8_SHOWN)


def decode_frames(file: MediaFile, wanted: NDArray[np.int64], total: int, limits: DecodeLimits) -> Pixels:
    """Decode a video up to its last wanted frame: ``[t, height, width, 3]``, uint8, RGB, upright.

    ``wanted`` are ascending indices ``[t]``.  Of the ``total`` frames that were counted a few may not come
    out of the decoder.  Raises as :func:`decode_video`.
    """
    frames: Pixels | None = None
    size, upright, taken, count = (0, 0), Upright(), 0, 0
    for frame in file.frames(file.picture_track()):
        limits.check_sides(frame.width, frame.height)
        if count == wanted[taken]:
            if frames is None:
                # Later frames may be of other sizes: they follow the first.
                size = fit_frames(len(wanted), frame.width, frame.height, limits)
                upright = Upright.of(frame)
                sides = size if upright.swapped else size[::-1]
                frames = np.empty((len(wanted), *sides, 3), np.uint8)
            frames[taken] = upright(_to_rgb(frame, size))
            taken += 1
            if taken == len(wanted):
                return frames
        count += 1
    if frames is None or total - count > min(_UNDECODED, total // 2):
        raise cut_short(f"of {total} frames {count} can be decoded")
    frames[taken:] = frames[taken - 1]
    return frames


@dataclass(frozen=True)
class Upright:
    """What is done to a video's frames before they are shown: phones film lying or mirrored, and say so.

    Rows become columns (``swapped``) before anything else.
    """

    swapped: bool = False
    left_right: bool = False
    up_down: bool = False

    @classmethod
    def of(cls, frame: av.VideoFrame) -> Self:
        """Read it from a frame's display matrix; of one that turns by no right angle, take the nearest."""
        with reading():
            # PyAV's stubs call it a dictionary of motion vectors alone.
            sides: Any = frame.side_data
            data = sides.get(SideDataType.DISPLAYMATRIX)
        if data is None:
            return cls()
        # x' = a x + c y and y' = b x + d y (ISO 14496-12, 6.2.2).
        a, b, c, d = _MATRIX.unpack_from(data)
        if abs(a) + abs(d) >= abs(b) + abs(c):
            return cls(False, a < 0, d < 0)
        return cls(True, c < 0, b < 0)

    def __call__(self, pixels: NDArray[Any]) -> NDArray[Any]:
        """Give ``[height, width, 3]`` as it is to be seen."""
        turned = pixels.swapaxes(0, 1) if self.swapped else pixels
        return turned[:: -1 if self.up_down else 1, :: -1 if self.left_right else 1]


def _to_rgb(frame: av.VideoFrame, size: tuple[int, int]) -> NDArray[Any]:
    with reading():
        if size == (frame.width, frame.height):
            return frame.to_ndarray(format="rgb24")
        return frame.to_ndarray(format="rgb24", width=size[0], height=size[1], interpolation="AREA")


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
        return _decode_animation(image, skipped, _choose(durations, limits), limits)


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


def _decode_animation(
    image: Image.Image, skipped: int, wanted: NDArray[np.int64], limits: DecodeLimits
) -> Pixels:
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

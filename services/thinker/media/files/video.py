"""Videos: their frames sampled as transformers does it, and decoded one after the other."""

import struct
from dataclasses import dataclass
from typing import Any, Final, Self

import av
import numpy as np
from av.packet import Packet
from av.sidedata.sidedata import Type as SideDataType
from av.video.stream import VideoStream
from numpy.typing import NDArray

from services.thinker.media.decoded import Pixels
from services.thinker.media.files.container import MediaFile, cut_short, reading
from services.thinker.media.files.formats import Format
from services.thinker.media.files.sampling import check_rate, fit_frames, sample_frames
from services.thinker.media.limits import MAX_FRAME_RATE, DecodeLimits, check_seconds

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

"""Sound: decoded, averaged to one channel, and resampled as librosa does it by default."""

from typing import Final

import av
import numpy as np
import soxr

from omnirelay.errors import MediaError
from services.thinker.media.container import MediaFile, reading
from services.thinker.media.decoded import DecodeLimits, Samples, check_seconds
from services.thinker.media.formats import Format

_RATES: Final = range(1_000, 1_000_001)
"""Samples a second of the sounds that are taken."""
_FULL_SCALE: Final = {"uint8": 2.0**7, "int16": 2.0**15, "int32": 2.0**31}
"""By dtype of the samples; of others, full scale is 1."""
_LOUDEST: Final = 1e10
"""Times full scale: far beyond files that hold integers as floats, and within what mel features can be."""


def decode_audio(data: bytes, form: Format, limits: DecodeLimits) -> Samples:
    """Decode the sound of a file, ``[n]``, float32, mono.

    Raises MediaError at none or damage, MediaTooLargeError if it lasts too long.
    """
    with MediaFile(data, form) as file:
        track = file.sound_track()
        if track is None:
            raise MediaError("there is no sound track in the file")
        check_seconds(file.declared_seconds(track) or 0.0, limits.max_audio_seconds)
        sound = _Sound(limits.sampling_rate)
        for frame in file.frames(track):
            sound.add(frame)
            check_seconds(sound.seconds, limits.max_audio_seconds, so_far=True)
    return sound.close()


def decode_sound_track(data: bytes, form: Format, limits: DecodeLimits) -> Samples:
    """Decode a video's sound, no more than a video may last: ``[n]``, float32, mono; or raise MediaError."""
    with MediaFile(data, form) as file:
        track = file.sound_track()
        if track is None:
            raise MediaError("there is no sound track in the video; use_audio_in_video needs one")
        sound = _Sound(limits.sampling_rate)
        for frame in file.frames(track):
            sound.add(frame)
            if sound.seconds >= limits.max_video_seconds:
                break
    return sound.close()[: int(limits.max_video_seconds * limits.sampling_rate)]


class _Sound:
    """Collects the frames of a track, resampled as they come: no long sound is held at its own rate."""

    def __init__(self, rate: int) -> None:
        self._rate: Final = rate
        self._own_rate = 0
        self._count = 0
        self._pieces: Final[list[Samples]] = []
        self._resampler: soxr.ResampleStream | None = None

    @property
    def seconds(self) -> float:
        return self._count / self._own_rate if self._own_rate else 0.0

    def add(self, frame: av.AudioFrame) -> None:
        if not self._own_rate:
            self._start(frame.sample_rate)
        if frame.sample_rate != self._own_rate:
            raise MediaError(
                f"its sampling rate changes from {self._own_rate} to {frame.sample_rate}; encode it with one"
            )
        samples = _mono(frame)
        self._count += samples.size
        self._pieces.append(self._resampler.resample_chunk(samples) if self._resampler else samples)

    def close(self) -> Samples:
        """All samples, once nothing follows; raises MediaError if there are none, or some are not finite."""
        if self._resampler:
            self._pieces.append(self._resampler.resample_chunk(np.empty(0, np.float32), last=True))
        samples = np.concatenate(self._pieces) if self._pieces else np.empty(0, np.float32)
        if not samples.size:
            raise MediaError("there are no samples in its sound track")
        if not np.isfinite(samples).all():
            raise MediaError("some of its samples are infinite or no numbers")
        if (peak := float(np.abs(samples).max())) > _LOUDEST:
            raise MediaError(f"its loudest sample is {peak:.3g} times full scale")
        return samples

    def _start(self, rate: int) -> None:
        if rate not in _RATES:
            raise MediaError(f"it has {rate} samples a second; {_RATES[0]} to {_RATES[-1]} are taken")
        self._own_rate = rate
        if rate != self._rate:
            self._resampler = soxr.ResampleStream(rate, self._rate, 1, dtype="float32", quality="HQ")


def _mono(frame: av.AudioFrame) -> Samples:
    """The average of the channels, ``[n]``; integers are scaled to [-1, 1)."""
    with reading():
        planes = frame.to_ndarray()
        if not frame.format.is_planar:
            planes = planes.reshape(-1, frame.layout.nb_channels).T
    scaled: Samples = planes.astype(np.float32)
    if planes.dtype == np.uint8:
        scaled -= np.float32(_FULL_SCALE["uint8"])
    scaled /= np.float32(_FULL_SCALE.get(planes.dtype.name, 1.0))
    return scaled[0] if len(scaled) == 1 else scaled.mean(axis=0)

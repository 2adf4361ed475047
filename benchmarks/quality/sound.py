"""How speech sounds, in figures: its pitch, and whether it ends where it should."""

import numpy as np

from benchmarks.quality.answers import Samples
from omnirelay.values import SAMPLE_RATE

_FRAME, _HOP = SAMPLE_RATE // 25, SAMPLE_RATE // 100
_LOWEST_HZ, _HIGHEST_HZ = 60, 350
_VOICED = 0.5
_LOUD = 0.3
_LENGTHS = (0.7, 1.4)
_LAST_SECONDS = 0.04
_QUIET = 0.15


def pitch(samples: Samples) -> float:
    """Return the median fundamental frequency of the voiced frames, in Hz; 0 where nothing is voiced."""
    if len(samples) < _FRAME:
        return 0.0
    frames = np.lib.stride_tricks.sliding_window_view(samples, _FRAME)[::_HOP].astype(np.float64)
    loudness = np.sqrt(np.mean(frames**2, axis=1))
    frames = frames[loudness > _LOUD * loudness.max()]
    if not len(frames):
        return 0.0
    frames = frames - frames.mean(axis=1, keepdims=True)
    power = np.abs(np.fft.rfft(frames, 2 * _FRAME)) ** 2
    correlation = np.fft.irfft(power)[:, :_FRAME]
    # The longer the lag, the fewer samples are compared.
    correlation /= correlation[:, :1] * (1 - np.arange(_FRAME) / _FRAME) + 1e-12
    shortest, longest = SAMPLE_RATE // _HIGHEST_HZ, SAMPLE_RATE // _LOWEST_HZ
    lags = correlation[:, shortest : longest + 1]
    best = lags.max(axis=1)
    # The first lag that is about as good as the best is the period; the others are its multiples.
    first = (lags > 0.9 * best[:, None]).argmax(axis=1)
    rising = [_top_of(row, start) for row, start in zip(lags, first, strict=True)]
    voiced = best > _VOICED
    if not voiced.any():
        return 0.0
    return float(SAMPLE_RATE / (np.median(np.asarray(rising)[voiced]) + shortest))


def _top_of(row: "np.ndarray[tuple[int], np.dtype[np.float64]]", start: int) -> int:
    """Climb from ``start`` to the top of its peak."""
    while start + 1 < len(row) and row[start + 1] > row[start]:
        start += 1
    return start


def ends_right(samples: Samples, natural_seconds: float, *, ended: bool) -> bool:
    """Return whether speech ended by itself, about as long as it naturally takes, and not within a sound.

    Args:
        samples: The speech.
        natural_seconds: How long the synthesizer that the voice is learnt from takes for the same words.
        ended: It stopped before the limit of its length.
    """
    seconds = len(samples) / SAMPLE_RATE
    shortest, longest = (factor * natural_seconds for factor in _LENGTHS)
    if not ended or not shortest <= seconds <= longest:
        return False
    last = samples[-round(_LAST_SECONDS * SAMPLE_RATE) :]
    return float(np.sqrt(np.mean(last**2))) < _QUIET * float(np.abs(samples).max())

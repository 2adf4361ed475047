"""Streams of samples at another rate, by low-pass filters that are computed as products of matrices."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
FACTOR: Final = 3
"""Samples of 24,000 a second for one of those in which an echo is looked for: below 3.6 kHz is enough."""
BLOCK: Final = 16
"""Steps that are computed by one product."""
_REACH: Final = 24
MARGIN: Final = 2 * _REACH
"""Samples before those that are decimated, which are needed for it: as many as make a block."""


def _low_pass(reach: int, cutoff: float, size: int, centre: float) -> Floats:
    """Return a filter of ``size`` taps, of which ``reach`` to both sides of the centre count.

    Args:
        cutoff: A part of half the rate of what comes in.
    """
    time = np.arange(size) - centre
    window = np.cos(np.clip(np.pi * time / (2 * reach + 2), -np.pi / 2, np.pi / 2)) ** 2
    taps = np.sinc(cutoff * time) * window
    return np.asarray(taps / taps.sum(), np.float32)


def _blocks(taps: Floats, step: int) -> Floats:
    """Return the halves of the matrix that makes a block of twice its samples, ``[2, samples, outputs]``.

    Args:
        taps: Of the filters, ``[taps, outputs]``, which go on by a step of samples.
    """
    matrix = np.zeros((2 * step * BLOCK, BLOCK, taps.shape[1]), np.float32)
    for at in range(BLOCK):
        matrix[step * at : step * at + len(taps), at] = taps
    return matrix.reshape(2, step * BLOCK, -1)


def _three_to_two() -> Floats:
    """Return the filters of the two samples that three become, ``[taps, 2]``; the last tap is the newest."""
    reach, size = 15, 3 * BLOCK + 3
    centres = (size - reach - 3, size - reach - 1.5)
    return np.stack([_low_pass(reach, 0.92 * 2 / 3, size, centre) for centre in centres], axis=1)


_DOWN: Final = _low_pass(_REACH, 0.9 / FACTOR, 2 * _REACH + 1, _REACH)
_UP: Final = FACTOR * _low_pass(_REACH - 1, 0.9 / FACTOR, 2 * _REACH, _REACH - 1)
DECIMATION: Final = _blocks(_DOWN[:, None], FACTOR)
INTERPOLATION: Final = _blocks(np.pad(_UP.reshape(-1, FACTOR)[::-1], ((1, 0), (0, 0))), 1)
TO_16_KHZ: Final = _blocks(_three_to_two(), 3)
"""Two samples for three."""


def resampled(samples: Floats, halves: Floats) -> Floats:
    """Return samples at another rate, without the first block, which is needed for those behind it."""
    rows = samples.reshape(-1, halves.shape[1])
    product: Floats = rows[:-1] @ halves[0] + rows[1:] @ halves[1]
    return product.reshape(-1)


class Resampler:
    """Brings a stream to another rate; before it is silence.

    Args:
        halves: One of the matrices above.
    """

    def __init__(self, halves: Floats) -> None:
        self._halves = halves
        self._before = np.zeros(halves.shape[1], np.float32)

    def push(self, samples: Floats) -> Floats:
        """Return the next samples; there must be whole blocks."""
        stream = np.concatenate([self._before, samples])
        self._before = stream[samples.size :]
        return resampled(stream, self._halves)

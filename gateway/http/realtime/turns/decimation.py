"""A third of the samples: below 3.6 kHz is enough to hear a user."""

from typing import Final

import numpy as np

from gateway.http.realtime.turns.silero import Floats

FACTOR: Final = 3
"""Samples of 24,000 a second for one of those that are compared."""


def _low_pass(reach: int, cutoff: float) -> Floats:
    time = np.arange(-reach, reach + 1)
    taps = np.sinc(cutoff * time / FACTOR) * np.cos(np.pi * time / (2 * reach + 2)) ** 2
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


_REACH: Final = 24
MARGIN: Final = 2 * _REACH
"""Samples before those that are decimated, which are needed for it: as many as make a block."""
BLOCK: Final = 16
"""Samples that are decimated, or interpolated, by one product."""
_DECIMATION: Final = _blocks(_low_pass(_REACH, 0.9)[:, None], FACTOR)
_INTERPOLATION: Final = _blocks(
    np.pad(FACTOR * np.append(_low_pass(_REACH - 1, 0.9), 0).reshape(-1, FACTOR)[::-1], ((1, 0), (0, 0))), 1
)


def decimated(samples: Floats) -> Floats:
    """Return one of :data:`FACTOR` samples, without the :data:`MARGIN` before them."""
    return _products(samples, _DECIMATION)


def _products(samples: Floats, halves: Floats) -> Floats:
    rows = samples.reshape(-1, halves.shape[1])
    product: Floats = rows[:-1] @ halves[0] + rows[1:] @ halves[1]
    return product.reshape(-1)


class Interpolator:
    """Brings a stream back to the rate that came in."""

    def __init__(self) -> None:
        self._before = np.zeros(BLOCK, np.float32)

    def interpolated(self, samples: Floats) -> Floats:
        """Return :data:`FACTOR` samples for each."""
        stream = np.concatenate([self._before, samples])
        self._before = stream[samples.size :]
        return _products(stream, _INTERPOLATION)

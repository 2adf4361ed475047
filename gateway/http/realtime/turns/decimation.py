"""A third of the samples: below 3.6 kHz is enough to hear a user."""

from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gateway.http.realtime.turns.silero import Floats

FACTOR: Final = 3
"""Samples of 24,000 a second for one of those that are compared."""


def _low_pass(reach: int, cutoff: float) -> Floats:
    time = np.arange(-reach, reach + 1)
    taps = np.sinc(cutoff * time / FACTOR) * np.cos(np.pi * time / (2 * reach + 2)) ** 2
    return np.asarray(taps / taps.sum(), np.float32)


def _blocks(taps: Floats) -> Floats:
    """Return the matrix that makes a block of decimated samples, ``[samples, BLOCK]``."""
    matrix = np.zeros((FACTOR * BLOCK + MARGIN, BLOCK), np.float32)
    for at in range(BLOCK):
        matrix[FACTOR * at : FACTOR * at + taps.size, at] = taps
    return matrix


_REACH: Final = 24
MARGIN: Final = 2 * _REACH
"""Samples before those that are decimated, which are needed for it."""
BLOCK: Final = 16
"""Samples that are decimated by one product."""
_DECIMATION: Final = _blocks(_low_pass(_REACH, 0.9))
_INTERPOLATION: Final = FACTOR * np.append(_low_pass(_REACH - 1, 0.9), 0).reshape(-1, FACTOR)[::-1].astype(
    np.float32
)
"""Filters of the three samples that are made of one, ``[taps, FACTOR]``."""


def decimated(samples: Floats) -> Floats:
    """Return one of :data:`FACTOR` samples, without the :data:`MARGIN` before them."""
    rows = sliding_window_view(samples, len(_DECIMATION))[:: FACTOR * BLOCK]
    return (np.ascontiguousarray(rows) @ _DECIMATION).reshape(-1)


class Interpolator:
    """Brings a stream back to the rate that came in."""

    def __init__(self) -> None:
        self._before = np.zeros(len(_INTERPOLATION) - 1, np.float32)

    def interpolated(self, samples: Floats) -> Floats:
        """Return :data:`FACTOR` samples for each."""
        stream = np.concatenate([self._before, samples])
        self._before = stream[samples.size :]
        return (sliding_window_view(stream, len(_INTERPOLATION)) @ _INTERPOLATION).reshape(-1)

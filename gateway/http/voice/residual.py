"""Tells a user from what an echo's filter leaves of the echo, in bands of 32 ms.

Each band has its leak, the part of an echo that the filter lately left.  What exceeds the leak and the noise
by a margin is a user; so is what exceeds the loudest echo so far, even where the filter does not fit.
"""

from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gateway.http.voice.resampling import FACTOR, Floats
from shared.messages import SAMPLE_RATE

WINDOW: Final = 256
"""Samples of 32 ms."""
_EDGES: Final = (150, 350, 600, 900, 1250, 1700, 2250, 2900, 3600)
_CENTRES: Final = np.mean([_EDGES[:-1], _EDGES[1:]], axis=0)
_BINS: Final = np.fft.rfftfreq(WINDOW, FACTOR / SAMPLE_RATE)[:, None]
_BANK: Final = ((_EDGES[:-1] <= _BINS) & (_EDGES[1:] > _BINS)).astype(np.float32)
_BANDS: Final = len(_EDGES) - 1
_HANN: Final = np.hanning(WINDOW).astype(np.float32) * np.float32(2 / WINDOW)
_FADING: Final = np.float32(0.4)
"""Part of an echo's power that is left after a window: reverberation."""
_SOUND: Final = np.float32(0.01)
"""Part of the loudest echo of a band below which its leak is not measured."""
_LEAST: Final = 3
"""Windows with sound of the answer from which a leak is known."""
_BEST_LEAK: Final = np.float32(0.002)
"""A leak is never taken for less: of all sounds, no filter cancels each so well."""
_MOVED_LEAK: Final = (np.pi / 2 / SAMPLE_RATE * _CENTRES).astype(np.float32) ** 2
"""A leak is no less while the delay may be wrong by a quarter of a sample."""
_RISE: Final = np.float32(1.3)
"""Factor by which a leak may grow in a step: what is left may be a user."""
_MARGIN: Final = np.float32(4)
"""So many times the leak may be echo, too; up to four times more where the leak is large."""
_POOR: Final = np.float32(0.05)
"""A large leak."""
_LOUDEST: Final = np.float32(4)
"""So many times the loudest echo may be echo."""
_FORGOTTEN: Final = np.float32(0.99)
"""Factor of the loudest echo in a window."""
_NOISE_RISE: Final = np.float32(1.02)
_NOISE_MARGIN: Final = np.float32(8)
_MOST_DB: Final = 15.0
"""Of a band's part in what exceeds echo and noise."""
_EXCESS_DB: Final = 6.5
"""Mean over the loudest half of the bands of what exceeds echo and noise, in a window of the user's."""
_HOLD: Final = 7
"""Windows from such a one that are the user's, too: sounds of speech differ in level."""


class ResidualEcho:
    """What is known of the leaks, the loudest echo and the noise of a session."""

    def __init__(self) -> None:
        self._leaks = np.ones(_BANDS, np.float32)
        self._noise = np.full(_BANDS, np.inf, np.float32)
        self._loudest = np.full(_BANDS, np.inf, np.float32)
        self._since_user = _HOLD
        self._fitted = True

    def learn(self, left: Floats, echo: Floats) -> None:
        """Learn the leaks: smaller ones at once, larger ones more slowly, for a user may speak."""
        residue, sound = _levels(left, echo)
        sounding = sound > _SOUND * sound.max(axis=0) + 1e-12
        parts = np.sort(np.where(sounding, residue / (sound + 1e-12), np.inf), axis=0)
        count = sounding.sum(axis=0)
        part = np.take_along_axis(parts, (np.maximum(count, 1) - 1)[None] // 2, axis=0)[0]
        leaks = np.where(count < _LEAST, self._leaks, np.minimum(part, self._leaks * _RISE))
        self._leaks = np.clip(leaks, _BEST_LEAK, 1)

    def fits(self) -> None:
        """The filter fits for the first time: from now on it is known how loud an echo is."""
        self._loudest = np.zeros(_BANDS, np.float32)

    def moved(self) -> None:
        """The delay was found again, with the same filter."""
        self._leaks = np.maximum(self._leaks, _MOVED_LEAK)

    def ignored(self) -> None:
        """Nothing is known of a window."""
        self._since_user = _HOLD

    def explains(self, left: Floats, echo: Floats, fits: bool) -> list[bool | None]:
        """Return which windows behind the first an echo and noise explain; none if that is not known.

        Args:
            fits: Whether the filter does.
        """
        residue, sound = _levels(left, echo)
        before, residue, sound = residue[:-1], residue[1:], sound[1:]
        time = np.arange(1, len(residue) + 1, dtype=np.float32)[:, None]
        rise, fade = _NOISE_RISE**time, _FORGOTTEN**time
        noise = rise * np.minimum.accumulate(np.minimum(self._noise, (before + residue) / 2 / rise))
        self._noise = noise[-1]
        most: Floats = _LOUDEST * self._loudest
        if self._fitted and not fits:
            # What was a user's by a filter that does not fit may be an echo that has moved.
            self._since_user = _HOLD
        self._fitted = fits
        if fits:
            loudest = fade * np.maximum.accumulate(np.maximum(self._loudest, sound / fade))
            self._loudest = loudest[-1]
            most = np.minimum(self._most(sound), _LOUDEST * loudest)
        found: list[bool | None] = []
        for is_user in _exceeds(residue, most + _NOISE_MARGIN * noise):
            self._since_user = 0 if is_user else self._since_user + 1
            found.append(False if self._since_user < _HOLD else True if fits else None)
        return found

    def explains_now(self, left: Floats, echo: Floats) -> list[bool]:
        """Return which windows an echo and noise explain by what is known now, though they are past."""
        residue, sound = _levels(left, echo)
        self._since_user, found = _HOLD, list[bool]()
        for is_user in _exceeds(residue, self._most(sound) + _NOISE_MARGIN * self._noise):
            self._since_user = 0 if is_user else self._since_user + 1
            found.append(self._since_user >= _HOLD)
        return found

    def _most(self, sound: Floats) -> Floats:
        """Return how loud the rest of an echo may be: the larger the leak, the less is known of it."""
        return _MARGIN * (1 + 3 * np.minimum(1, self._leaks / _POOR)) * self._leaks * sound


def _levels(left: Floats, echo: Floats) -> tuple[Floats, Floats]:
    """Return the power of what is left, and of the echo with its reverberation, ``[windows, bands]``."""
    spectrum = np.fft.rfft(np.stack([left, echo]).reshape(-1, WINDOW) * _HANN)
    powers = np.asarray((spectrum.real**2 + spectrum.imag**2) @ _BANK, np.float32)
    residue, sound = powers.reshape(2, -1, _BANDS)
    for before, after in pairwise(sound):
        np.maximum(after, _FADING * before, out=after)
    return residue, sound


def _exceeds(residue: Floats, explained: Floats) -> NDArray[np.bool_]:
    """Return in which windows sound exceeds what explains it, in the loudest half of the bands."""
    excess = 10 * np.log10(residue / (explained + 1e-9) + 1e-9)
    excess = np.sort(np.clip(excess, 0, _MOST_DB))[:, _BANDS // 2 :]
    return np.asarray(excess.mean(axis=1) > _EXCESS_DB)

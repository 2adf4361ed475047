"""How recordings are made elsewhere, to measure with: each condition alone, and noises never trained with."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from labs.training.data import augmentation
from labs.training.data.augmentation import RATE
from labs.training.data.synthesis import Wave

Recorded = Callable[[Wave, np.random.Generator], Wave]
"""What becomes of a spoken question, 16 kHz."""
_LEVEL = -22.0
_TRAFFIC_SLOPE = 1.4
_SYLLABLES_HZ = 4.0


def _silence(before: float, after: float) -> Recorded:
    return lambda wave, _draw: np.pad(wave, (round(before * RATE), round(after * RATE)))


def _noise(decibels: float, slope: float, depth: float = 0.0) -> Recorded:
    """Noise over a question and half a second around it; ``depth`` makes it swing as syllables do."""

    def recorded(wave: Wave, draw: np.random.Generator) -> Wave:
        wave = augmentation.at_level(wave, _LEVEL)
        around = np.pad(wave, RATE // 2)
        noise = augmentation.with_noise(
            np.zeros_like(around), augmentation.loudness_of(wave), decibels, draw, slope
        )
        swing = np.sin(2 * np.pi * _SYLLABLES_HZ * np.arange(len(around)) / RATE)
        return around + noise * (1 + depth * swing).astype(np.float32)

    return recorded


def _level(decibels: float) -> Recorded:
    return lambda wave, _draw: np.clip(augmentation.at_level(wave, decibels), -1, 1)


def _codec(container: str) -> Recorded:
    return lambda wave, _draw: augmentation.compressed(augmentation.at_level(wave, _LEVEL), container)


def _noises(decibels: float) -> dict[str, Recorded]:
    return {
        "white": _noise(decibels, 0.0),
        "as of traffic": _noise(decibels, _TRAFFIC_SLOPE),
        "as of voices": _noise(decibels, 0.7, depth=0.8),
    }


CONDITIONS: Final[Mapping[str, Mapping[str, Recorded]]] = {
    "silence around": {
        **{f"{seconds} s before": _silence(seconds, 0) for seconds in (0.5, 0.8, 1.0, 1.5, 3.0)},
        **{f"{seconds} s after": _silence(0, seconds) for seconds in (1.0, 2.0)},
        "2.4 s on both sides": _silence(2.4, 2.4),
    },
    "telephone": {
        "8 kHz": lambda wave, _draw: augmentation.narrowed(wave, 8_000),
        "G.711": lambda wave, _draw: augmentation.telephone(wave),
    },
    "noise at 20 dB": _noises(20),
    "noise at 10 dB": _noises(10),
    "other devices": {
        "11 kHz": lambda wave, _draw: augmentation.narrowed(wave, 11_025),
        "overdriven": lambda wave, _draw: augmentation.overdriven(wave, 20),
        "-40 dBFS": _level(-40),
        "a room": augmentation.in_room,
        "MP3": _codec("MP3"),
        "Opus": _codec("OGG"),
    },
}
"""Conditions by group and name."""

WORDLESS: Final[Mapping[str, Recorded]] = {
    "silence": lambda _wave, draw: augmentation.silence(draw),
    "noise or music": lambda _wave, draw: augmentation.noise_or_music(draw),
}
"""Recordings in which nobody speaks; what was said is not used."""

"""Augmentation of recordings: speed, loudness, reverberation, spectral colour, noise, padding."""

import numpy as np
import numpy.typing as npt
import soxr

from checkpoint.training.data.synthesis import Wave

RATE = 16_000
_SPEEDS = (0.88, 1.14)
_LOUDNESS = (0.015, 0.2)
_SILENCE_SECONDS = 0.35
_ECHO_SECONDS = (0.05, 0.35)
_NOISE_DECIBELS = (8.0, 40.0)
_PLAIN = 0.15


def vary(wave: Wave, draw: np.random.Generator) -> Wave:
    """Return ``wave``, 16 kHz, with random augmentations."""
    if draw.random() < _PLAIN:
        return wave
    if draw.random() < 0.6:
        # Also shifts the pitch, as of somebody smaller or larger.
        wave = soxr.resample(wave, RATE, RATE / draw.uniform(*_SPEEDS), quality="LQ").astype(np.float32)
    if draw.random() < 0.4:
        wave = _in_room(wave, draw)
    if draw.random() < 0.4:
        wave = _coloured(wave, draw)
    wave = wave * np.float32(np.exp(draw.uniform(*np.log(_LOUDNESS))) / _loudness(wave))
    before, after = (draw.uniform(0, _SILENCE_SECONDS, 2) * RATE).astype(int)
    wave = np.pad(wave, (before, after))
    if draw.random() < 0.7:
        wave = wave + _noise(len(wave), _loudness(wave), draw).astype(np.float32)
    return np.clip(wave, -1, 1)


def _loudness(wave: Wave) -> float:
    return float(np.sqrt(np.mean(np.square(wave)))) + 1e-6


def _convolved(wave: Wave, response: npt.NDArray[np.float64]) -> Wave:
    size = 1 << (len(wave) + len(response) - 2).bit_length()
    product = np.fft.rfft(wave, size) * np.fft.rfft(response, size)
    return np.fft.irfft(product, size)[: len(wave)].astype(np.float32)


def _in_room(wave: Wave, draw: np.random.Generator) -> Wave:
    """Add reverberation: convolve with decaying noise."""
    length = int(draw.uniform(*_ECHO_SECONDS) * RATE)
    response = draw.standard_normal(length) * np.exp(-6.9 * np.arange(length) / length)
    response *= draw.uniform(0.1, 0.5) / np.sqrt(np.sum(response**2))
    response[0] = 1.0
    return _convolved(wave, response)


def _coloured(wave: Wave, draw: np.random.Generator) -> Wave:
    """Apply a random short filter, as another microphone would."""
    response = np.zeros(5)
    response[0] = 1.0
    response[1:] = draw.uniform(-0.35, 0.35, 4) * (0.7 ** np.arange(4))
    return _convolved(wave, response)


def _noise(length: int, loudness: float, draw: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return noise between white and brown, some decibels below a loudness."""
    spectrum = np.fft.rfft(draw.standard_normal(length))
    spectrum /= np.maximum(np.arange(len(spectrum)), 20.0) ** draw.uniform(0, 1)
    noise = np.fft.irfft(spectrum, length)
    wanted = loudness * 10 ** (-draw.uniform(*_NOISE_DECIBELS) / 20)
    return noise * (wanted / (np.sqrt(np.mean(noise**2)) + 1e-9))

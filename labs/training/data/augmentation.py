"""Augmentation of recordings: silence, pauses, speed, level, rooms, noise, telephones, codecs."""

import io

import numpy as np
import numpy.typing as npt
import soundfile
import soxr

from labs.training.data.synthesis import Wave

RATE = 16_000
TOKEN = RATE // 25
"""Samples for which the audio encoder gives one token."""
SILENT = -1.0
"""The moment of a token in which nothing of the question is said."""
_PLAIN = 0.1
_SPEEDS = (0.8, 1.25)
_PAUSE_SECONDS = (0.15, 0.8)
_CUT_SECONDS = 0.12
_ECHO_SECONDS = (0.05, 0.5)
SILENCE_SECONDS = 3.0
"""Most silence on each side of what is said."""
_DECIBELS = (-40.0, -12.0)
_NOISE_DECIBELS = (5.0, 40.0)
_OVERDRIVEN_DECIBELS = (6.0, 24.0)
_MOST_NOTES = 12
_MU = 255.0

Moments = npt.NDArray[np.float32]
"""For each token, or sample, which part of the question has been said; :data:`SILENT` where nothing is."""


def vary(
    wave: Wave, draw: np.random.Generator, silence_seconds: float = SILENCE_SECONDS
) -> tuple[Wave, Moments]:
    """Return ``wave``, 16 kHz, with random augmentations, and the moment of each of its tokens."""
    moments = np.linspace(0, 1, len(wave), dtype=np.float32)
    if draw.random() < _PLAIN:
        return wave, moments[::TOKEN]
    if draw.random() < 0.5:
        # Also shifts the pitch, as of somebody smaller or larger.
        wave = soxr.resample(wave, RATE, RATE / draw.uniform(*_SPEEDS), quality="LQ").astype(np.float32)
        moments = np.linspace(0, 1, len(wave), dtype=np.float32)
    if draw.random() < 0.1:
        first = int(draw.uniform(0, _CUT_SECONDS) * RATE)
        wave, moments = wave[first:], moments[first:]
    if draw.random() < 0.15:
        wave, moments = _with_pause(wave, moments, draw)
    if draw.random() < 0.35:
        wave = in_room(wave, draw)
    if draw.random() < 0.35:
        wave = _coloured(wave, draw)
    wave = at_level(wave, draw.uniform(*_DECIBELS))
    loudness = loudness_of(wave)
    before, after = (draw.uniform(0, silence_seconds, 2) * RATE).astype(int)
    wave = np.pad(wave, (before, after))
    moments = np.pad(moments, (before, after), constant_values=SILENT)
    if draw.random() < 0.6:
        wave = with_noise(wave, loudness, draw.uniform(*_NOISE_DECIBELS), draw)
    if draw.random() < 0.1:
        wave = overdriven(wave, draw.uniform(*_OVERDRIVEN_DECIBELS))
    return np.clip(_transmitted(np.clip(wave, -1, 1), draw), -1, 1), moments[::TOKEN]


def _transmitted(wave: Wave, draw: np.random.Generator) -> Wave:
    """Send a recording through a telephone, a lower sample rate or a lossy codec, or leave it."""
    kind = draw.random()
    if kind < 0.15:
        return narrowed(wave, 8_000)
    if kind < 0.3:
        return telephone(wave)
    if kind < 0.36:
        return narrowed(wave, 11_025)
    if kind < 0.42:
        return compressed(wave, "MP3" if draw.random() < 0.5 else "OGG")
    return wave


def loudness_of(wave: Wave) -> float:
    """Return the mean level of a recording, of 1 at full scale."""
    return float(np.sqrt(np.mean(np.square(wave)))) + 1e-6


def at_level(wave: Wave, decibels: float) -> Wave:
    """Return a recording whose mean level is so many dB below full scale."""
    return wave * np.float32(10 ** (decibels / 20) / loudness_of(wave))


def overdriven(wave: Wave, decibels: float) -> Wave:
    """Return a recording that is clipped so far below its peak."""
    return np.clip(wave * np.float32(10 ** (decibels / 20) / (np.abs(wave).max() + 1e-6)), -1, 1)


def narrowed(wave: Wave, rate: int) -> Wave:
    """Return a recording that was made at a lower sample rate."""
    low = soxr.resample(wave, RATE, rate, quality="LQ")
    again = soxr.resample(low, rate, RATE, quality="LQ").astype(np.float32)
    return np.pad(again, (0, max(0, len(wave) - len(again))))[: len(wave)]


def telephone(wave: Wave) -> Wave:
    """Return a recording as G.711 transmits it: 8 kHz, 300 to 3,400 Hz, 8 bits on the mu-law."""
    spectrum = np.fft.rfft(wave)
    hertz = np.arange(len(spectrum)) * (RATE / max(1, len(wave)))
    wave = np.fft.irfft(spectrum * ((hertz > 300) & (hertz < 3400)), len(wave)).astype(np.float32)
    squeezed = np.sign(wave) * np.log1p(_MU * np.clip(np.abs(wave), 0, 1)) / np.log1p(_MU)
    squeezed = np.round(squeezed * 127) / 127
    return (np.sign(squeezed) * np.expm1(np.abs(squeezed) * np.log1p(_MU)) / _MU).astype(np.float32)


def compressed(wave: Wave, container: str) -> Wave:
    """Return a recording that went through a lossy codec: ``MP3``, or ``OGG`` with Opus."""
    file = io.BytesIO()
    subtype = "OPUS" if container == "OGG" else "MPEG_LAYER_III"
    soundfile.write(file, wave, RATE, format=container, subtype=subtype)
    again, rate = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    again = soxr.resample(again, rate, RATE) if rate != RATE else again
    return np.pad(again, (0, max(0, len(wave) - len(again))))[: len(wave)].astype(np.float32)


def _with_pause(wave: Wave, moments: Moments, draw: np.random.Generator) -> tuple[Wave, Moments]:
    """Insert silence where a recording is quiet, as between two words."""
    frames = wave[: len(wave) // TOKEN * TOKEN].reshape(-1, TOKEN)[2:-2]
    if not len(frames):
        return wave, moments
    quietest = np.argsort(np.square(frames).mean(axis=1))[:3]
    place = int((draw.choice(quietest) + 2.5) * TOKEN)
    length = int(draw.uniform(*_PAUSE_SECONDS) * RATE)
    return (
        np.insert(wave, place, np.zeros(length, np.float32)),
        np.insert(moments, place, np.full(length, SILENT, np.float32)),
    )


def _convolved(wave: Wave, response: npt.NDArray[np.float64]) -> Wave:
    size = 1 << (len(wave) + len(response) - 2).bit_length()
    product = np.fft.rfft(wave, size) * np.fft.rfft(response, size)
    return np.fft.irfft(product, size)[: len(wave)].astype(np.float32)


def in_room(wave: Wave, draw: np.random.Generator) -> Wave:
    """Add reverberation: convolve with decaying noise."""
    length = int(draw.uniform(*_ECHO_SECONDS) * RATE)
    response = draw.standard_normal(length) * np.exp(-6.9 * np.arange(length) / length)
    response *= draw.uniform(0.1, 0.6) / np.sqrt(np.sum(response**2))
    response[0] = 1.0
    return _convolved(wave, response)


def _coloured(wave: Wave, draw: np.random.Generator) -> Wave:
    """Apply a random short filter, as another microphone would."""
    response = np.zeros(5)
    response[0] = 1.0
    response[1:] = draw.uniform(-0.35, 0.35, 4) * (0.7 ** np.arange(4))
    return _convolved(wave, response)


def with_noise(
    wave: Wave, loudness: float, decibels: float, draw: np.random.Generator, slope: float | None = None
) -> Wave:
    """Add noise so far below a loudness, white for a ``slope`` of 0, brown for 1; else between them."""
    noise = _noise(len(wave), draw, slope)
    return wave + noise * np.float32(loudness * 10 ** (-decibels / 20))


def _noise(length: int, draw: np.random.Generator, slope: float | None = None) -> Wave:
    """Return noise of a mean level of 1."""
    spectrum = np.fft.rfft(draw.standard_normal(length))
    slope = draw.uniform(0, 1) if slope is None else slope
    spectrum /= np.maximum(np.arange(len(spectrum)), 20.0) ** slope
    noise = np.fft.irfft(spectrum, length)
    return (noise / loudness_of(noise.astype(np.float32))).astype(np.float32)


def silence(draw: np.random.Generator) -> Wave:
    """Return a recording of nothing: digital silence, or noise that nobody hears."""
    length = int(draw.uniform(0.3, 5.0) * RATE)
    if draw.random() < 0.4:
        return np.zeros(length, np.float32)
    return at_level(_noise(length, draw), draw.uniform(-90, -60))


def noise_or_music(draw: np.random.Generator) -> Wave:
    """Return a recording without words: noise, or notes of a few harmonics each."""
    length = int(draw.uniform(0.5, 5.0) * RATE)
    if draw.random() < 0.5:
        return at_level(_noise(length, draw), draw.uniform(-40, -12))
    wave, times = np.zeros(length, np.float32), np.arange(length) / RATE
    for _ in range(draw.integers(1, _MOST_NOTES)):
        begin, pitch = draw.uniform(0, length / RATE), 110 * 2 ** (draw.integers(0, 36) / 12)
        since = np.maximum(times - begin, 0)
        envelope = np.exp(-since * draw.uniform(0.5, 6)) * (since > 0)
        for harmonic in range(1, draw.integers(2, 6)):
            wave += (envelope * np.sin(2 * np.pi * pitch * harmonic * since) / harmonic).astype(np.float32)
    return np.clip(at_level(wave, draw.uniform(-36, -12)), -1, 1)

"""Log-mel spectrograms as the vocoder takes them: 80 bins, 100 frames a second of 24 kHz audio."""

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from labs.training.data.synthesis import SAMPLE_RATE

BINS = 80
HOP = 240
_WINDOW = 1024
_HIGHEST_HERTZ = 8000
_FLOOR = 1e-3
# Slaney's mel scale: linear below 1 kHz, logarithmic above.
_LINEAR_STEP, _CORNER_HERTZ, _CORNER_MEL, _LOG_STEP = 200 / 3, 1000.0, 15.0, np.log(6.4) / 27

_Floats = npt.NDArray[np.float64]


def _mel_of(hertz: float) -> float:
    if hertz < _CORNER_HERTZ:
        return hertz / _LINEAR_STEP
    return float(_CORNER_MEL + np.log(hertz / _CORNER_HERTZ) / _LOG_STEP)


def _hertz_of(mel: _Floats) -> _Floats:
    logarithmic = _CORNER_HERTZ * np.exp(_LOG_STEP * (mel - _CORNER_MEL))
    return np.where(mel >= _CORNER_MEL, logarithmic, mel * _LINEAR_STEP)


@functools.cache
def _filters() -> torch.Tensor:
    """Return triangular filters ``[bins, frequencies]``, each of area one."""
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _WINDOW // 2 + 1)
    corners = _hertz_of(np.linspace(0.0, _mel_of(_HIGHEST_HERTZ), BINS + 2))
    widths = np.diff(corners)
    distances = corners[:, None] - frequencies[None]
    rising, falling = -distances[:-2] / widths[:-1, None], distances[2:] / widths[1:, None]
    weights = np.maximum(0, np.minimum(rising, falling)) * (2 / (corners[2:] - corners[:-2]))[:, None]
    return torch.tensor(weights, dtype=torch.float32)


@functools.cache
def hann(length: int, device: torch.device) -> torch.Tensor:
    """Return a Hann window."""
    return torch.hann_window(length, device=device)


def log_mel(waves: torch.Tensor) -> torch.Tensor:
    """Return natural logarithms of mel amplitudes, ``[batch, samples]`` to ``[batch, bins, frames]``.

    The samples must be a multiple of :data:`HOP`; a frame is centred on its own samples.
    """
    margin = (_WINDOW - HOP) // 2
    padded = functional.pad(waves, (margin, margin), mode="reflect")
    window = hann(_WINDOW, waves.device)
    spectrum = torch.stft(padded, _WINDOW, HOP, _WINDOW, window, center=False, return_complex=True)
    magnitude = torch.sqrt(spectrum.real.square() + spectrum.imag.square() + 1e-9)
    return torch.log(torch.clamp(_filters().to(waves.device) @ magnitude, min=_FLOOR))

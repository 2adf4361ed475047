"""Log-mel spectrograms as the vocoder takes them: 80 bins, 100 frames a second of 24 kHz audio."""

import functools

import torch
from torch.nn import functional
from transformers.audio_utils import mel_filter_bank

from labs.training.data.synthesis import SAMPLE_RATE

BINS = 80
HOP = 240
_WINDOW = 1024
_HIGHEST_HERTZ = 8000
_FLOOR = 1e-3


@functools.cache
def _filters() -> torch.Tensor:
    """Return triangular filters ``[frequencies, bins]`` on Slaney's mel scale, each of area one."""
    frequencies = _WINDOW // 2 + 1
    weights = mel_filter_bank(
        frequencies, BINS, 0, _HIGHEST_HERTZ, SAMPLE_RATE, norm="slaney", mel_scale="slaney"
    )
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
    return torch.log(torch.clamp(_filters().T.to(waves.device) @ magnitude, min=_FLOOR))

"""Mel frames that depend on nothing that comes later.

The reference (transformers' ``WhisperFeatureExtractor``) clamps log-mel values at the maximum of the whole
recording - 8, so a loud moment changes quiet frames before it.  Here the maximum is that up to the end of a
frame's window.  Both are equal where the loudest moment is in the first window.
"""

from typing import Any, Final

import numpy as np
import torch

from services.thinker.media.decoded import Samples

_SMALLEST: Final = 1e-10
_RANGE: Final = 8.0
_SHIFT: Final = 4.0


def log_mel_of(samples: Samples, extractor: Any) -> torch.Tensor:
    """Log-mel values ``[bins, frames]`` of a recording, as the reference has them before it clamps.

    A second of silence is appended, as for the reference.
    """
    padded = np.concatenate([samples, np.zeros(int(extractor.sampling_rate), np.float32)])
    window = torch.hann_window(extractor.n_fft)
    waveform = torch.from_numpy(padded)
    stft = torch.stft(waveform, extractor.n_fft, extractor.hop_length, window=window, return_complex=True)
    power = (stft[..., :-1].abs() ** 2).contiguous()
    mel = torch.from_numpy(extractor.mel_filters).to(torch.float32).T @ power
    return torch.clamp(mel, min=_SMALLEST).log10()


def clamp_by_window(log_mel: torch.Tensor, frames: int) -> torch.Tensor:
    """Clamp and scale log-mel ``[bins, n]``, each window of ``frames`` by the maximum up to its end."""
    loudest = torch.tensor(-torch.inf)
    pieces = []
    for window in log_mel.split(frames, dim=1):
        loudest = torch.maximum(loudest, window.max())
        pieces.append((torch.maximum(window, loudest - _RANGE) + _SHIFT) / _SHIFT)
    return torch.cat(pieces, dim=1)

"""Initial noise of the diffusion, the same for a frame wherever and whenever it is drawn.

A streamed window needs the noise that the whole utterance would have had at its frames, and a
request that is resumed on another machine needs the noise it had on the first.  So noise is a pure
function of (seed, frame): Philox, a counter-based generator (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", 2011), is keyed by the seed and its counter set by the frame.
"""

import numpy as np
import torch

_FRAMES_PER_COUNTER = 64
_MANTISSA_SHIFT = np.uint64(11)
_UNIT = 2.0**-53


def initial_noise(seed: int, frames: int, mel_dim: int, start: int = 0) -> torch.Tensor:
    """Standard normal noise for consecutive mel frames of a stream, float32 [frames, mel_dim], on the CPU.

    ``initial_noise(s, n, d)[a:b]`` equals ``initial_noise(s, b - a, d, start=a)`` for any n >= b.
    A seed is an unsigned 64-bit integer.
    """
    if frames == 0:
        return torch.empty(0, mel_dim)
    first = start // _FRAMES_PER_COUNTER
    last = (start + frames - 1) // _FRAMES_PER_COUNTER
    noise = np.concatenate([_noise_block(seed, index, mel_dim) for index in range(first, last + 1)])
    skip = start - first * _FRAMES_PER_COUNTER
    return torch.from_numpy(noise[skip : skip + frames].copy())


def _noise_block(seed: int, index: int, mel_dim: int) -> np.ndarray:
    """Noise of one fixed block of frames, float32 [64, mel_dim].

    Box-Muller on the raw bits rather than numpy's own normal distribution, whose algorithm numpy may
    change from one release to the next; in float64, so that rounding to float32 hides differences
    between mathematical libraries.
    """
    generator = np.random.Philox(key=seed, counter=[0, 0, 0, index])
    half = _FRAMES_PER_COUNTER * mel_dim // 2
    bits = generator.random_raw(2 * half) >> _MANTISSA_SHIFT
    radius = np.sqrt(-2.0 * np.log((bits[:half] + 1.0) * _UNIT))
    angle = 2.0 * np.pi * (bits[half:] * _UNIT)
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1)
    return pairs.reshape(_FRAMES_PER_COUNTER, mel_dim).astype(np.float32)

"""How long codec frames and their streams sound, by code2wav's part of a configuration."""

from math import prod
from typing import Any, Final

from services.families.family import SynthesisBytes

UNIT_SAMPLES: Final = 240
"""10 ms: what a step's budget of audio counts."""
SYNTHESIS: Final = SynthesisBytes(solver_frame=0, vocoder_frame=1_900_000, stream=5_200_000)
"""Measured on a CPU, with the released sizes and random weights."""


def frame_samples(code2wav: Any) -> int:
    """Samples that a codec frame lasts."""
    return prod(code2wav.upsampling_ratios) * prod(code2wav.upsample_rates)


def samples_of(code2wav: Any, frames: int) -> int:
    """Samples of a stream of so many codec frames: each transposed convolution trims both of its ends."""
    length = frames * prod(code2wav.upsampling_ratios)
    for rate in code2wav.upsample_rates:
        length = max(0, length - 1) * rate
    return length


def trimmed_samples(code2wav: Any) -> int:
    """By how many samples any stream is shorter than its frames."""
    return frame_samples(code2wav) - samples_of(code2wav, 1)

"""What is known of the codec without a checkpoint."""

from typing import Final

from omnirelay.values import SAMPLE_RATE

FRAME_SAMPLES: Final = 480
"""Samples of a codec token, 20 ms."""
CODEC_RATE: Final = SAMPLE_RATE / FRAME_SAMPLES
"""Codec tokens a second, 50; while text is written, each needs a conditioning row of its own."""

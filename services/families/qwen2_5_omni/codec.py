"""What is known of the codec without a checkpoint."""

from typing import Final

CODEC_RATE: Final = 50
"""Codec tokens a second; while text is written, each needs a conditioning row of its own."""

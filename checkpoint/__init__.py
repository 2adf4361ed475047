"""Random checkpoints of Qwen2.5-Omni, small enough to test and to measure the server on any machine."""

from checkpoint.shape import BENCH, RELEASED_VOCABULARY, SMALL, TINY, CheckpointShape
from checkpoint.writer import RECIPE_FILE, write_checkpoint

__all__ = [
    "BENCH",
    "RECIPE_FILE",
    "RELEASED_VOCABULARY",
    "SMALL",
    "TINY",
    "CheckpointShape",
    "write_checkpoint",
]

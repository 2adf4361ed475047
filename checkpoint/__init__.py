"""Random checkpoints: small enough for tests on any machine, or of the released 3B's size."""

from checkpoint.large import write_large
from checkpoint.shape import BENCH, RELEASED_3B, RELEASED_VOCABULARY, SMALL, TINY, CheckpointShape
from checkpoint.writer import RECIPE_FILE, write_checkpoint

__all__ = [
    "BENCH",
    "RECIPE_FILE",
    "RELEASED_3B",
    "RELEASED_VOCABULARY",
    "SMALL",
    "TINY",
    "CheckpointShape",
    "write_checkpoint",
    "write_large",
]

"""Random checkpoints of Qwen3-Omni."""

from checkpoint.qwen3_omni.shape import SMALL, TINY, Qwen3Shape
from checkpoint.qwen3_omni.writer import write_qwen3_omni

__all__ = ["SMALL", "TINY", "Qwen3Shape", "write_qwen3_omni"]

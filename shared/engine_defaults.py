"""What a stage's engine takes where its configuration leaves it open; without PyTorch, for the doctor too."""

import os
from typing import Final

from shared.config import EngineConfig, SynthesisEngineConfig

CPU_KV_CACHE_BYTES: Final = 256 * 2**20
"""KV cache of a stage on a CPU: vLLM's own default claims most of the machine."""
ALONE_UTILIZATION: Final = 0.85
"""Share of a GPU that vLLM may use when a stage has it to itself."""
CPU_BLOCK_SIZE: Final = 32
"""Positions of a KV block on a CPU, the fewest for which vLLM's attention is made; vLLM's own default is 128.

The prefix cache keeps whole blocks: the larger they are, the more of a prompt is computed again."""


CPU_BATCH: Final = 16
"""Requests that a stage on a CPU computes at once."""
GPU_BATCH: Final = 64
"""The same on a GPU, where a step takes hardly longer for them."""


def batch_size(config: SynthesisEngineConfig, on_cpu: bool) -> int:
    """Give the most requests that a stage computes at once; of token2wav, the most chunks."""
    return config.max_num_seqs or (CPU_BATCH if on_cpu else GPU_BATCH)


def kv_cache_bytes(config: EngineConfig, on_cpu: bool) -> int | None:
    """Give the size of a stage's KV cache; none where vLLM measures what a GPU has left."""
    return config.kv_cache_memory_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None)


def compute_threads(configured: int | None, stages: int) -> int:
    """Give the number of threads that a stage computes with.

    Threads of stages that share cores spin against each other, and all become several times slower.

    Args:
        configured: ``stages.STAGE.threads``.
        stages: How many stages share the machine.
    """
    if configured is not None:
        return configured
    inherited = os.environ.get("OMP_NUM_THREADS", "")
    if inherited.isdecimal() and int(inherited):
        return int(inherited)
    return max(1, (os.cpu_count() or 1) // stages)

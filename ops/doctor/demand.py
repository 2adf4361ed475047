"""What the stages need of a machine without GPUs; ``docs/memory.md`` has the formulas."""

from typing import Final

from omnirelay.cli.output import GIB
from services.families.sizes import Model, weight_bytes
from shared.config import Config
from shared.engine_defaults import kv_cache_bytes
from shared.messages import StageName
from shared.sharing import engine_of

STAGE_BYTES: Final = 3 * GIB // 4
"""What a stage's process takes beside weights and KV cache, roughly: Python, PyTorch, vLLM."""


def kv_bytes_on_cpu(config: Config, stage: StageName) -> int:
    """The size of a stage's KV cache on a CPU."""
    engine = engine_of(config, stage)
    return 0 if engine is None else kv_cache_bytes(engine, on_cpu=True) or 0


def on_cpu(config: Config, model: Model) -> dict[StageName, int]:
    """Roughly what each stage takes of a machine without GPUs, with all replicas that are started there."""
    return {
        stage: config.stage(stage).replicas
        * (weight_bytes(config, model, stage) + kv_bytes_on_cpu(config, stage) + STAGE_BYTES)
        for stage in config.served_stages
    }

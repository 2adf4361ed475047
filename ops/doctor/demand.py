"""What each stage needs of memory; ``docs/operations.md`` has the formulas."""

from typing import Final

from omnirelay.cli.output import GIB
from ops.doctor.checkpoint import Model
from shared.config import Config, EngineConfig
from shared.engine_defaults import kv_cache_bytes
from shared.messages import StageName

STAGE_BYTES: Final = 3 * GIB // 4
"""What a stage's process takes beside weights and KV cache, roughly: Python, PyTorch, vLLM."""
DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def engine_of(config: Config, stage: StageName) -> EngineConfig | None:
    """The engine's configuration of a stage with a KV cache; none for token2wav."""
    return {"thinker": config.stages.thinker.engine, "talker": config.stages.talker.engine}.get(stage)


def parallel(config: Config, stage: StageName) -> int:
    """GPUs that a stage computes on."""
    engine = engine_of(config, stage)
    return engine.tensor_parallel_size if engine else 1


def weight_bytes(config: Config, model: Model, stage: StageName) -> int:
    """What a stage's weights take when they are loaded."""
    return model.weights.elements[stage] * _number_bytes(config, model, stage)


def position_bytes(config: Config, model: Model, stage: StageName) -> int:
    """What one position of a request takes in a stage's KV cache."""
    return model.paged[stage].elements * _number_bytes(config, model, stage)


def longest(config: Config, model: Model, stage: StageName) -> int:
    """Most positions of one request at a stage with a KV cache."""
    engine = engine_of(config, stage)
    most = model.paged[stage].positions
    return most if engine is None or engine.max_model_len is None else engine.max_model_len


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


def _number_bytes(config: Config, model: Model, stage: StageName) -> int:
    engine = engine_of(config, stage)
    if engine is None:
        # token2wav always computes in float32.
        return DTYPE_BYTES["float32"]
    return DTYPE_BYTES.get(model.dtype if engine.dtype == "auto" else engine.dtype, 4)

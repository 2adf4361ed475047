"""What each stage needs of memory, by a checkpoint's files; ``docs/memory.md`` has the formulas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointError, ConfigError
from services.families.family import Paged, SynthesisBytes
from services.families.known import family_of
from shared.checkpoints import read_config
from shared.config import Config
from shared.devices import Gpu
from shared.messages import STAGES, StageName
from shared.model_files import Weights, read_weights
from shared.sharing import GIB, Need, batch_of, engine_of, parallel, utilization_of

DTYPE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTISED_KV_BYTES: Final = 1
GPU_BLOCK_SIZE: Final = 16
"""Positions of a KV block on a GPU, as vLLM chooses it."""
CONTEXT_BYTES: Final = GIB
"""Estimated: what CUDA, its libraries, kernels and graphs take in each process on a GPU."""
WORKING_RATIO: Final = 0.25
"""Estimated: what a step takes beside the weights, as a share of them, where the shapes do not say."""


@dataclass(frozen=True)
class Model:
    """What a checkpoint's files say of the model; ``quantization`` is as ``config.json`` has it."""

    dtype: str
    weights: Weights
    paged: Mapping[StageName, Paged]
    synthesis: SynthesisBytes
    quantization: str | None = None


def read_model(directory: Path, stages: Sequence[StageName] = STAGES) -> Model:
    """Read what a checkpoint's files say; raises CheckpointError if one cannot be read, or lacks weights.

    Weights are missed of those stages that are served.
    """
    config = read_config(directory)
    family = family_of(config)
    found = read_weights(directory)
    elements: dict[str, int] = {stage: found.elements.get(family.weights[stage], 0) for stage in STAGES}
    packed: dict[str, int] = {stage: found.packed.get(family.weights[stage], 0) for stage in STAGES}
    if absent := [stage for stage in stages if not elements[stage] + packed[stage]]:
        alone = "" if "thinker" in absent else ": a thinker alone is served with `text_only`"
        raise CheckpointError(f"there are no weights of {', '.join(absent)}{alone}")
    family.check_files(directory)
    quantization = config.get("quantization_config")
    return Model(
        dtype_of(config),
        Weights(found.nbytes, elements, packed),
        family.paged(config),
        family.synthesis,
        str(quantization.get("quant_method")) if isinstance(quantization, dict) else None,
    )


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype that weights are kept in, by the content of ``config.json``."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def require_one_dtype(config: Config, dtype: str) -> None:
    """Raise ConfigError unless thinker and talker compute in one dtype: rows cross as bytes of it."""
    chosen = {"thinker": config.stages.thinker.engine.dtype, "talker": config.stages.talker.engine.dtype}
    used = {stage: dtype if own == "auto" else own for stage, own in chosen.items()}
    if not config.text_only and used["thinker"] != used["talker"]:
        raise ConfigError(
            f"the thinker computes in {used['thinker']}, the talker in {used['talker']}, and conditioning "
            "rows cross between them as bytes of one dtype: set stages.thinker.engine.dtype and "
            f"stages.talker.engine.dtype to the same (the checkpoint has {dtype})"
        )


def require_divisible(config: Config, stage: StageName, paged: Paged) -> None:
    """Raise ConfigError if a stage's model cannot be divided among its configured workers."""
    workers = parallel(config, stage)
    reasons = [f"its {name} are {size}" for name, size in paged.divided.items() if size % workers]
    shared = paged.key_value_heads
    if shared and shared % workers and workers % shared:
        reasons.append(f"its key-value heads are {shared}, which is neither a multiple nor a divisor")
    if reasons:
        raise ConfigError(
            f"stages.{stage}.engine.tensor_parallel_size is {workers}, which does not divide the model: "
            f"{'; '.join(reasons)}"
        )


def weight_bytes(config: Config, model: Model, stage: StageName) -> int:
    """What a stage's weights take when they are loaded."""
    packed = model.weights.packed.get(stage, 0)
    return model.weights.elements[stage] * number_bytes(config, model, stage) + packed


def position_bytes(config: Config, model: Model, stage: StageName) -> int:
    """What one position of a request takes in a stage's KV cache."""
    paged, size = model.paged[stage], number_bytes(config, model, stage)
    engine = engine_of(config, stage)
    quantised = engine is not None and engine.kv_cache_dtype != "auto"
    kv = QUANTISED_KV_BYTES if quantised else size
    # The conditioning row keeps the model's dtype.
    return (paged.elements - paged.row) * kv + paged.row * size


def longest(config: Config, model: Model, stage: StageName) -> int:
    """Most positions of one request at a stage with a KV cache."""
    engine = engine_of(config, stage)
    most = model.paged[stage].positions
    return most if engine is None or engine.max_model_len is None else engine.max_model_len


def number_bytes(config: Config, model: Model, stage: StageName) -> int:
    """Bytes of a number of a stage's computation."""
    engine = engine_of(config, stage)
    if engine is None:
        # token2wav always computes in float32.
        return DTYPE_BYTES["float32"]
    return DTYPE_BYTES.get(model.dtype if engine.dtype == "auto" else engine.dtype, 4)


def need_of(config: Config, model: Model, stage: StageName, gpu: Gpu) -> Need:
    """What a process of a stage takes of a GPU that it shares."""
    processes, claimed = config.stage(stage).replicas, utilization_of(config, stage)
    if claimed is not None:
        return Need(stage, processes, int(claimed * gpu.total_bytes))
    engine, gpus = engine_of(config, stage), parallel(config, stage)
    weights = weight_bytes(config, model, stage) // gpus
    if engine is None:
        synthesis, batch = config.stages.token2wav.synthesis, batch_of(config, stage, on_cpu=False)
        taken = model.synthesis
        working = synthesis.max_batch_frames * taken.solver_frame
        working += synthesis.max_vocoder_frames * taken.vocoder_frame + batch * taken.stream
        return Need(stage, processes, CONTEXT_BYTES + weights + working)
    paged, working = model.paged[stage], int(WORKING_RATIO * weights)
    if paged.step:
        numbers = engine.max_num_batched_tokens * paged.step + paged.media
        working = numbers * number_bytes(config, model, stage)
    fixed = CONTEXT_BYTES + weights + working
    if engine.kv_cache_memory_bytes is not None:
        return Need(stage, processes, fixed + engine.kv_cache_memory_bytes)
    position, positions = position_bytes(config, model, stage) // gpus, longest(config, model, stage)
    # Blocks of the cache are whole; one of them is vLLM's null block.
    positions += 2 * (engine.block_size or GPU_BLOCK_SIZE)
    return Need(
        stage, processes, fixed, position, positions, batch_of(config, stage, on_cpu=False) * positions
    )

"""What each stage needs of memory, by a checkpoint's files, and where its engine computes with how much.

``docs/memory.md`` has the formulas.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from omnirelay.errors import CheckpointError, ConfigError
from services.families.family import Paged, SynthesisBytes
from services.families.known import family_of
from shared.checkpoints import read_config
from shared.config import Config, StageConfig, TalkerConfig, ThinkerConfig
from shared.devices import Gpu
from shared.messages import STAGES, StageName
from shared.model_files import Weights, read_weights
from shared.sharing import (
    GIB,
    Need,
    Share,
    batch_of,
    device_names,
    divide,
    engine_of,
    is_shared,
    parallel,
    stages_on,
    utilization_of,
)

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
    """What a checkpoint's files say of the model."""

    dtype: str
    weights: Weights
    paged: Mapping[StageName, Paged]
    synthesis: SynthesisBytes


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
    return Model(
        dtype_of(config), Weights(found.nbytes, elements, packed), family.paged(config), family.synthesis
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


log = logging.getLogger(__name__)
S = TypeVar("S", bound=StageConfig)


@contextmanager
def placed(config: Config, name: StageName, stage: S, directory: Path) -> Iterator[S]:
    """Load a stage's engine in this context: no other one loads on its GPUs while it measures their memory.

    Gives the stage's configuration, with its share of a GPU that other processes compute on too.

    Raises:
        ConfigError: The stages on a GPU do not fit on it, or thinker and talker have unequal dtypes,
            or ``tensor_parallel_size`` does not divide the model.
        CheckpointError: Their sizes cannot be read.
        StageStartError: Stages cannot compute on this platform.
    """
    from shared.vllm.environment import INHERITED_DEVICES  # noqa: PLC0415 - after the environment is prepared
    from shared.vllm.gpus import loading, visible_gpus  # noqa: PLC0415

    told = read_config(directory)
    require_one_dtype(config, dtype_of(told))
    if parallel(config, name) > 1:
        require_divisible(config, name, family_of(told).paged(told)[name])
    gpus = visible_gpus()[: parallel(config, name)]
    if gpus and config.share_gpus:
        model = read_model(directory, config.served_stages)
        share = share_of(config, name, model, gpus, INHERITED_DEVICES)
        stage = stage if share is None else with_share(stage, share, gpus)
    with loading(gpus, measures=measures(stage)):
        yield stage


def measures(stage: StageConfig) -> bool:
    """Whether vLLM makes a stage's KV cache as large as what it finds free."""
    return isinstance(stage, ThinkerConfig | TalkerConfig) and stage.engine.kv_cache_memory_bytes is None


def share_of(
    config: Config, name: StageName, model: Model, gpus: list[Gpu], inherited: str | None = None
) -> Share | None:
    """The share of its GPUs that a stage has; None if it has them alone, or a share by its configuration.

    ``inherited`` is ``CUDA_VISIBLE_DEVICES`` before it was set for the stage.
    """
    if utilization_of(config, name) is not None:
        return None
    shares = []
    for device, gpu in zip(device_names(config, name, len(gpus), inherited), gpus, strict=False):
        stages = stages_on(config, device, len(gpus), inherited)
        if is_shared(config, stages):
            shares.append(divide(gpu, [need_of(config, model, stage, gpu) for stage in stages])[name])
    # On several GPUs the KV caches must be equal.
    return min(shares, key=lambda share: share.nbytes, default=None)


def with_share(stage: S, share: Share, gpus: list[Gpu]) -> S:
    """A stage's configuration with its share of its GPUs."""
    # vLLM only checks that so much is free, and does not measure.
    values: dict[str, float] = {"gpu_memory_utilization": share.nbytes / min(gpu.total_bytes for gpu in gpus)}
    if share.kv_bytes is not None:
        values["kv_cache_memory_bytes"] = share.kv_bytes
    names, whole, cache = ", ".join(gpu.name for gpu in gpus), share.nbytes / GIB, (share.kv_bytes or 0) / GIB
    log.info("shares %s: %.1f GiB, of which %.1f for the KV cache", names, whole, cache)
    # Sections are frozen; these fields are among those of every engine.
    engine = getattr(stage, "engine").model_copy(update=values)  # noqa: B009 - StageConfig declares none
    return stage.model_copy(update={"engine": engine})

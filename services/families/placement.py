"""Where a stage's engine computes, and with how much memory: settled before anything is loaded."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from services.families.known import family_of
from services.families.sizes import Model, dtype_of, need_of, read_model, require_divisible, require_one_dtype
from shared.checkpoints import read_config
from shared.config import Config, StageConfig
from shared.devices import Gpu
from shared.messages import StageName
from shared.sharing import GIB, Share, device_names, divide, is_shared, parallel, stages_on, utilization_of

log = logging.getLogger(__name__)
S = TypeVar("S", bound=StageConfig)


@contextmanager
def placed(config: Config, name: StageName, stage: S, directory: Path) -> Iterator[S]:
    """Load a stage's engine in this context: no other one loads on its GPUs meanwhile.

    Gives the stage's configuration, with its share of a GPU that other processes compute on too.

    Raises:
        ConfigError: The stages on a GPU do not fit on it, or thinker and talker have unequal dtypes,
            or ``tensor_parallel_size`` does not divide the model.
        CheckpointError: Their sizes cannot be read.
        StageStartError: Stages cannot compute on this platform.
    """
    from shared.vllm.environment import inherited_devices  # noqa: PLC0415 - after the environment is prepared
    from shared.vllm.gpus import loading_alone, visible_gpus  # noqa: PLC0415

    told = read_config(directory)
    require_one_dtype(config, dtype_of(told))
    if parallel(config, name) > 1:
        require_divisible(config, name, family_of(told).paged(told)[name])
    gpus = visible_gpus()[: parallel(config, name)]
    if gpus and config.share_gpus:
        model = read_model(directory, config.served_stages)
        share = share_of(config, name, model, gpus, inherited_devices())
        stage = stage if share is None else with_share(stage, share, gpus)
    with loading_alone(gpus):
        yield stage


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
    values: dict[str, object] = {
        # vLLM only checks that so much is free, and does not measure.
        "gpu_memory_utilization": share.nbytes / min(gpu.total_bytes for gpu in gpus)
    }
    if share.kv_bytes is not None:
        values["kv_cache_memory_bytes"] = share.kv_bytes
    log.info(
        "shares %s: %.1f GiB, of which %.1f for the KV cache",
        ", ".join(gpu.name for gpu in gpus),
        share.nbytes / GIB,
        (share.kv_bytes or 0) / GIB,
    )
    # Sections are frozen; these fields are among those of every engine.
    engine = getattr(stage, "engine").model_copy(update=values)  # noqa: B009 - StageConfig declares none
    return stage.model_copy(update={"engine": engine})

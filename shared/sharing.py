"""How stages that compute on one GPU divide its memory; without PyTorch, for the doctor too.

All of them know the device's size and the checkpoint, so each computes the same division by itself, before
it loads anything.  What they need besides weights and KV cache is estimated, not measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from omnirelay.errors import ConfigError
from shared.config import Config, EngineConfig
from shared.devices import Gpu
from shared.engine_defaults import batch_size
from shared.messages import StageName

GIB: Final = 2**30
USABLE: Final = 0.9
"""Share of a GPU that stages divide; the rest is the driver's, and for what the estimates lack."""


@dataclass(frozen=True)
class Need:
    """What one process of a stage takes of a GPU.

    Attributes:
        stage: The stage.
        processes: How many there are of it.
        fixed: Bytes without a KV cache that can be chosen.
        position: Bytes of a position in such a KV cache; 0 if there is none.
        longest: Positions that the KV cache must have.
        most: Positions of use: more requests than fit in a batch need none.
    """

    stage: StageName
    processes: int
    fixed: int
    position: int = 0
    longest: int = 0
    most: int = 0


@dataclass(frozen=True)
class Share:
    """What one process of a stage gets of a GPU.

    Attributes:
        nbytes: All in all.
        kv_bytes: Size of its KV cache, where that could be chosen.
    """

    nbytes: int
    kv_bytes: int | None


def divide(gpu: Gpu, needs: Sequence[Need]) -> dict[StageName, Share]:
    """Divide a GPU among its stages: KV caches get the same number of positions, as far as they are of use.

    Raises:
        ConfigError: They do not fit, with the longest request of each; the message has the sum.
    """
    usable = int(USABLE * gpu.total_bytes)
    least = {need.stage: need.processes * (need.fixed + need.position * need.longest) for need in needs}
    if sum(least.values()) > usable:
        parts = ", ".join(f"{stage} {nbytes / GIB:.1f}" for stage, nbytes in least.items())
        raise ConfigError(
            f"{gpu.name} has {gpu.total_bytes / GIB:.1f} GiB, of which stages may use {usable / GIB:.1f}; "
            f"they need {sum(least.values()) / GIB:.1f} ({parts}): lower stages.STAGE.engine.max_model_len, "
            "give stages GPUs of their own (stages.STAGE.devices), or take a smaller checkpoint"
        )
    positions = _positions(usable - sum(need.processes * need.fixed for need in needs), needs)
    shares = {}
    for need in needs:
        kv = need.position * max(need.longest, min(positions, need.most)) if need.position else None
        shares[need.stage] = Share(need.fixed + (kv or 0), kv)
    return shares


def _positions(room: int, needs: Sequence[Need]) -> int:
    """Most positions that all KV caches can have, but for those that have ``most`` or need ``longest``."""
    paged = [need for need in needs if need.position]

    def taken(positions: int) -> int:
        return sum(
            need.processes * need.position * max(need.longest, min(positions, need.most)) for need in paged
        )

    low, high = 0, max((need.most for need in paged), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if taken(middle) <= room else (low, middle - 1)
    return low


def engine_of(config: Config, stage: StageName) -> EngineConfig | None:
    """The engine's configuration of a stage with a KV cache; none for token2wav."""
    return {"thinker": config.stages.thinker.engine, "talker": config.stages.talker.engine}.get(stage)


def batch_of(config: Config, stage: StageName, on_cpu: bool) -> int:
    """The most requests that a replica computes at once."""
    return batch_size(engine_of(config, stage) or config.stages.token2wav.engine, on_cpu)


def utilization_of(config: Config, stage: StageName) -> float | None:
    """The configured share of a GPU of a stage."""
    engine = engine_of(config, stage) or config.stages.token2wav.engine
    return engine.gpu_memory_utilization


def parallel(config: Config, stage: StageName) -> int:
    """GPUs that a stage computes on."""
    engine = engine_of(config, stage)
    return engine.tensor_parallel_size if engine else 1


def device_names(config: Config, stage: StageName, count: int, inherited: str | None) -> list[str]:
    """The GPUs that a stage sees: indices or UUIDs.

    Args:
        count: How many there are where nothing names any.
        inherited: ``CUDA_VISIBLE_DEVICES`` with which the stages are started.
    """
    devices = config.stage(stage).devices
    named = inherited if devices is None else devices
    return [str(index) for index in range(count)] if named is None else [n.strip() for n in named.split(",")]


def stages_on(config: Config, device: str, count: int, inherited: str | None) -> list[StageName]:
    """The stages that compute on a GPU."""
    return [
        stage
        for stage in config.served_stages
        if device in device_names(config, stage, count, inherited)[: parallel(config, stage)]
    ]


def is_shared(config: Config, stages: Sequence[StageName]) -> bool:
    """Whether more than one process computes on a GPU with these stages."""
    return sum(config.stage(stage).replicas for stage in stages) > 1

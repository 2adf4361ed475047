"""What differs between a CPU and a GPU: the worker's base class, a few engine defaults, precision."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_dcp_group,
    get_dp_group,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.llm_engine import LLMEngine

from omnirelay.errors import StageStartError
from shared.checkpoints import read_config
from shared.config import EngineConfig, Precision
from shared.devices import cuda_compiler
from shared.engine_defaults import ALONE_UTILIZATION, CPU_BLOCK_SIZE, batch_size, kv_cache_bytes
from shared.messages import StageName
from shared.vllm.workers import prepared_workers


def require_platform() -> None:
    """Raise :class:`StageStartError` if the stages cannot compute where vLLM does."""
    if current_platform.is_cpu() or current_platform.is_cuda_alike():
        return
    if current_platform.is_unspecified():
        raise StageStartError(
            "vLLM finds no device to compute on: its CUDA build needs a GPU and a driver that `nvidia-smi` "
            "reaches; to compute on the CPU, install its CPU build (`make env`)"
        )
    raise StageStartError(
        f"vLLM would compute on {current_platform.device_type}, which the stages are not made for: they "
        "derive from its workers for CUDA, ROCm and CPUs (docs/deployment.md#platforms)"
    )


def lacks_avx512() -> bool:
    """Whether vLLM computes on an x86 processor without AVX-512: its operators for it are fewer."""
    x86 = current_platform.is_cpu() and current_platform.get_cpu_architecture() == CpuArchEnum.X86
    return x86 and not torch.cpu._is_avx512_supported()


def require_quantization(stage: StageName, model: Path, config: EngineConfig) -> None:
    """Check that this machine can compute with weights and a KV cache that are quantised so.

    Raises:
        StageStartError: It cannot; vLLM would fail over a missing operator, some only at the first request.
        CheckpointError: config.json cannot be read.
    """
    values = read_config(model)
    of_thinker = (values.get("thinker_config") or {}).get("text_config") or {}
    told = values.get("quantization_config") or of_thinker.get("quantization_config") or {}
    # What config.json says is of the thinker's weights alone.
    method = config.quantization or (told.get("quant_method") if stage == "thinker" else None) or ""
    if method == "fp8" and current_platform.is_cpu() and not torch.cpu._is_amx_tile_supported():
        raise StageStartError(
            "weights of FP8 cannot be computed here: vLLM's CPU build needs a processor with AMX for them; "
            "take a checkpoint of plain weights, or of four bits (AWQ, GPTQ)"
        )
    if not lacks_avx512():
        return
    if "awq" in method or "gptq" in method:
        raise StageStartError(
            f"a checkpoint of four bits ({method}) needs a processor with AVX-512; take one of plain weights"
        )
    if config.kv_cache_dtype != "auto":
        raise StageStartError(
            f"stages.{stage}.engine.kv_cache_dtype is {config.kv_cache_dtype}: vLLM's CPU build needs a "
            "processor with AVX-512 for that; leave it at auto"
        )


def architecture_of(model: str) -> str:
    """The name by which vLLM knows a model of ours, by that of its class."""
    return f"OmniRelay{model}"


def register_model(model: type[nn.Module]) -> str:
    """Let vLLM find a model in this process; gives its architecture."""
    architecture = architecture_of(model.__name__)
    ModelRegistry.register_model(architecture, model)
    return architecture


def worker_base() -> type[Any]:
    """The vLLM worker class of this platform; the other one's module need not load here."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: PLC0415

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker  # noqa: PLC0415

    return Worker


def precompiled_kernels() -> dict[str, Any]:
    """Engine arguments that avoid FlashInfer, which vLLM prefers on Blackwell, where there is no nvcc."""
    if not current_platform.is_cuda() or not current_platform.has_device_capability(100) or cuda_compiler():
        return {}
    return {"attention_backend": AttentionBackendEnum.FLASH_ATTN, "moe_backend": "triton"}


def build_engine(
    stage: StageName, model: Path, config: EngineConfig, *, log_stats: bool, **specific: Any
) -> LLMEngine:
    """Make a vLLM engine in this process.

    Args:
        stage: Whose engine it is; vLLM's metrics have it as the name of the model.
        log_stats: Keep vLLM's own metrics, in prometheus_client's default registry.
        specific: Further engine arguments: architecture, scheduler, worker.

    Returns:
        The engine.  Steps are synchronous: what was computed in a step can be read right after it.

    Raises:
        StageStartError: This machine cannot compute with weights that are quantised so.
        CheckpointError: config.json cannot be read.
    """
    require_quantization(stage, model, config)
    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(model),
        "served_model_name": stage,
        "dtype": _checkpoint_dtype(model) if config.dtype == "auto" else config.dtype,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "load_format": config.load_format,
        "max_model_len": config.max_model_len,
        "max_num_seqs": batch_size(config, on_cpu),
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_memory_bytes": kv_cache_bytes(config, on_cpu),
        "gpu_memory_utilization": config.gpu_memory_utilization or ALONE_UTILIZATION,
        "enforce_eager": config.enforce_eager or on_cpu,
        "tensor_parallel_size": config.tensor_parallel_size,
        "block_size": config.block_size or (CPU_BLOCK_SIZE if on_cpu else None),
        "scheduling_policy": "priority",
        "async_scheduling": False,
        "disable_log_stats": not log_stats,
        "use_tqdm_on_load": False,
    }
    arguments |= precompiled_kernels()
    with prepared_workers():
        engine = LLMEngine.from_engine_args(EngineArgs(**(arguments | specific)))
    if on_cpu:
        # The cores are the model's; beside a GPU there are others.
        end_groups_of_one()
    # vLLM would add the end tokens of generation_config.json to every request's; those are text tokens,
    # and mean something else to the talker.  Each request names its own end tokens.
    engine.input_processor.generation_config_fields = {}
    return engine


def _checkpoint_dtype(model: Path) -> str:
    """The dtype the weights are kept in: vLLM's own ``auto`` would halve float32.

    Raises:
        CheckpointError: config.json is missing or is not JSON.
    """
    values = read_config(model)
    dtype = values.get("dtype") or values.get("torch_dtype")
    return str(dtype) if dtype else "auto"


_GROUPS: Final[tuple[Callable[[], GroupCoordinator], ...]] = (
    get_tp_group,
    get_pp_group,
    get_dp_group,
    get_dcp_group,
    get_pcp_group,
)


def end_groups_of_one() -> None:
    """End the groups of one member, but for the world's, by which vLLM knows where to make others.

    vLLM sends nothing within a group of one.  What it asks of a group later, its size and its own place in
    it, the group still tells.  With a model in other processes there are none here.
    """
    if not model_parallel_is_initialized():
        return
    for group_of in _GROUPS:
        group = group_of()
        if group.world_size == 1:
            group.destroy()


_MATMUL: Final[dict[Precision, str]] = {"exact": "highest", "fast": "high", "bfloat16": "high"}


def set_float32_precision(precision: Precision) -> None:
    """Choose between float32 and TF32 (10 bits of mantissa) for products and convolutions of this process.

    With ``bfloat16`` it is TF32 for what stays float32.

    PyTorch's own choice is float32 for products and TF32 for convolutions; vLLM sets the former again when
    it makes an engine, so this is called after it.
    """
    torch.set_float32_matmul_precision(_MATMUL[precision])
    # PyTorch's older switches, as vLLM's: mixed with the newer ones, reading either raises.
    torch.backends.cudnn.allow_tf32 = precision != "exact"

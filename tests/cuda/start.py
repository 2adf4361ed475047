"""``python -m tests.cuda.start STAGE MODEL`` prints what a start on an H100 would choose; it needs no card.

Run with vLLM's CUDA build, and something in the place of the driver's library.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast
from unittest.mock import Mock, patch

import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability

from benchmarks.measure.stage import DEFAULTS, service_of
from shared.config import StageConfig, TalkerConfig, ThinkerConfig
from shared.messages import StageName
from shared.vllm.environment import prepare_environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


class Hopper(NonNvmlCudaPlatform):
    """A card that is asked for nothing but what it is."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:  # noqa: ARG003
        """9.0."""
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:  # noqa: ARG003
        """Give a name."""
        return "NVIDIA H100"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:  # noqa: ARG003
        """80 GiB."""
        return 80 * 2**30

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:  # noqa: ARG003
        """132."""
        return 132


class ChosenError(Exception):
    """A start has come to where it would load weights."""


def main(stage: StageName, model: Path) -> dict[str, Any]:
    """Start a stage up to its engine; gives what was chosen by then, and what vLLM would choose next."""
    from vllm.compilation import backends  # noqa: PLC0415 - after the platform
    from vllm.config import set_current_vllm_config  # noqa: PLC0415 - as above
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415 - as above
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler  # noqa: PLC0415 - as above

    def stop(args: EngineArgs) -> NoReturn:
        raise ChosenError(args.create_engine_config())

    try:
        with patch.object(LLMEngine, "from_engine_args", stop):
            service_of(stage, model, config_of(stage))
    except ChosenError as chosen:
        config: VllmConfig = chosen.args[0]
    with set_current_vllm_config(config):
        found = {
            "compiler": backends.__name__,
            "sampler": TopKTopPSampler().forward.__name__,
            "eager": config.model_config.enforce_eager,
            "capture_sizes": config.compilation_config.cudagraph_capture_sizes,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
        }
        if stage != "token2wav":
            found |= graphs_of(config)
    return found


def config_of(stage: StageName) -> StageConfig:
    """The default one, but half precision, as released checkpoints have it."""
    default = DEFAULTS[stage]
    if not isinstance(default, ThinkerConfig | TalkerConfig):
        return default
    return default.model_copy(update={"engine": default.engine.model_copy(update={"dtype": "bfloat16"})})


def graphs_of(config: VllmConfig) -> dict[str, Any]:
    """How a model that reads rows from KV memory is captured, and with which attention."""
    from vllm.v1.attention.selector import get_attn_backend  # noqa: PLC0415 - after the platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415 - as above

    from shared.vllm.conditioning import RowBackend  # noqa: PLC0415 - as above

    attention = get_attn_backend(config.model_config.get_head_size(), config.model_config.dtype, None)
    runner = SimpleNamespace(
        vllm_config=config,
        compilation_config=config.compilation_config,
        uniform_decode_query_len=1,
        kv_cache_config=SimpleNamespace(has_mamba_layers=False, num_blocks=1000),
        max_num_reqs=config.scheduler_config.max_num_seqs,
        cudagraph_dispatcher=Mock(),
        speculative_config=None,
    )
    GPUModelRunner._check_and_update_cudagraph_mode(cast(Any, runner), [{attention, RowBackend}], [Mock()])
    mode = config.compilation_config.cudagraph_mode
    return {
        "attention": attention.get_name(),
        "decoding": mode.decode_mode().name,
        "mixed": mode.mixed_mode().name,
    }


if __name__ == "__main__":
    of = cast(StageName, sys.argv[1])
    prepare_environment(DEFAULTS[of])
    vllm.platforms.current_platform = Hopper()
    print(json.dumps(main(of, Path(sys.argv[2]))))

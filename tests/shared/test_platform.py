"""Where the stages compute, with what precision, and where they refuse to."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform, PlatformEnum, UnspecifiedPlatform

from omnirelay.errors import StageStartError
from shared.config import EngineConfig, Precision
from shared.vllm import gpus, platform
from shared.vllm.platform import set_float32_precision


class Rocm(Platform):
    """vLLM's own class cannot be loaded without such a device."""

    _enum = PlatformEnum.ROCM
    device_type = "cuda"


class Xpu(Platform):
    """The same."""

    _enum = PlatformEnum.XPU
    device_type = "xpu"


class Cuda(Platform):
    """The same; its number is that of the device."""

    _enum = PlatformEnum.CUDA
    device_type = "cuda"

    def __init__(self, major: int) -> None:
        self._major = major

    def has_device_capability(self, capability: Any, device_id: int = 0) -> bool:  # noqa: ARG002
        return 10 * self._major >= capability


def on(monkeypatch: pytest.MonkeyPatch, where: Platform) -> None:
    for module in (platform, gpus):
        monkeypatch.setattr(module, "current_platform", where)


@pytest.mark.parametrize(
    ("where", "told"),
    [(UnspecifiedPlatform(), "finds no device.*nvidia-smi.*make env"), (Xpu(), "on xpu.*CUDA, ROCm")],
)
def test_other_platforms_are_refused_with_the_reason(where: Platform, told: str, monkeypatch):
    on(monkeypatch, where)
    with pytest.raises(StageStartError, match=told):
        gpus.visible_gpus()


def test_a_cpu_has_no_gpus(monkeypatch):
    on(monkeypatch, CpuPlatform())
    assert gpus.visible_gpus() == []


def test_rocm_is_taken_like_cuda(monkeypatch):
    on(monkeypatch, Rocm())
    platform.require_platform()


@pytest.mark.parametrize(
    ("where", "nvcc", "changed"),
    [
        (Cuda(9), None, False),
        (Cuda(10), None, True),
        (Cuda(10), "/usr/local/cuda/bin/nvcc", False),
        (Rocm(), None, False),
        (CpuPlatform(), None, False),
    ],
)
def test_blackwell_without_nvcc_takes_kernels_that_are_compiled(
    where: Platform, nvcc: str | None, changed: bool, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, where)
    monkeypatch.setattr(platform, "cuda_compiler", lambda: nvcc)
    taken = platform.precompiled_kernels()
    assert bool(taken) == changed
    EngineArgs(model=str(tiny_checkpoint), **taken)


@pytest.mark.parametrize(
    ("checkpoint", "config", "refused"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "FP8 .* needs a processor with AMX"),
        ({"thinker_config": {"text_config": {"quantization_config": {"quant_method": "fp8"}}}}, {}, "AMX"),
        ({"quantization_config": {"quant_method": "awq"}}, {}, r"four bits \(awq\) needs .* AVX-512"),
        ({}, {"quantization": "gptq_marlin"}, "AVX-512"),
        ({}, {"kv_cache_dtype": "fp8"}, "stages.thinker.engine.kv_cache_dtype is fp8: .* AVX-512"),
        ({}, {}, None),
    ],
)
def test_what_a_processor_cannot_compute_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: dict[str, Any],
    config: dict[str, Any],
    refused: str | None,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(checkpoint), encoding="utf-8")
    engine = EngineConfig(**config)
    on(monkeypatch, CpuPlatform())
    for able in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda able=able: able)
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda able=able: able)
        with pytest.raises(StageStartError, match=refused) if refused and not able else nullcontext():
            platform.require_quantization("thinker", tmp_path, engine)
        if not config:
            platform.require_quantization("talker", tmp_path, engine)
    on(monkeypatch, Cuda(9))
    platform.require_quantization("thinker", tmp_path, engine)


CUDNN: Any = torch.backends.cudnn


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    matmul, cudnn = torch.get_float32_matmul_precision(), CUDNN.allow_tf32
    yield
    torch.set_float32_matmul_precision(matmul)
    CUDNN.allow_tf32 = cudnn


@pytest.mark.parametrize("precision", ["exact", "fast", "bfloat16"])
def test_products_and_convolutions_have_one_precision(precision: Precision) -> None:
    set_float32_precision("fast" if precision == "exact" else "exact")
    set_float32_precision(precision)
    for operators in (torch.backends.cuda.matmul, CUDNN.conv, CUDNN.rnn):
        assert (operators.fp32_precision == "tf32") is (precision != "exact")
    # What libraries read and set: it raises if the switches contradict each other.
    assert torch.get_float32_matmul_precision() == ("highest" if precision == "exact" else "high")
    assert CUDNN.allow_tf32 is (precision != "exact")
    with CUDNN.flags(enabled=True, benchmark=False):
        pass

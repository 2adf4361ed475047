"""Where the stages compute, and where they refuse to."""

import pytest
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform, PlatformEnum, UnspecifiedPlatform

from omnirelay.errors import StageStartError
from shared.vllm import gpus, platform


class Rocm(Platform):
    """vLLM's own class cannot be loaded without such a device."""

    _enum = PlatformEnum.ROCM
    device_type = "cuda"


class Xpu(Platform):
    """The same."""

    _enum = PlatformEnum.XPU
    device_type = "xpu"


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

"""What PyTorch and vLLM report of a machine, from a process that has loaded them; and its compilers."""

import os
import shutil
import sysconfig
from pathlib import Path

import msgspec


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU.

    Attributes:
        uuid: Names it on this machine; empty if it is not known.
    """

    name: str
    total_bytes: int
    uuid: str = ""


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of the libraries, and the GPUs.

    Attributes:
        cuda: CUDA version that PyTorch was built for; None for a CPU build.
        platform: Where vLLM computes: ``cpu`` or ``cuda``.
        driver: Newest CUDA version of the driver, ``13.0``; None without one.
    """

    torch: str
    cuda: str | None
    vllm: str
    platform: str
    gpus: list[Gpu] = []
    driver: str | None = None


def cuda_compiler() -> str | None:
    """Find nvcc where FlashInfer and DeepGEMM look for it when they compile kernels on the machine."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return shutil.which(
        "nvcc", path=f"{home}/bin" if home else f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    )


def mps_runs() -> bool:
    """Whether NVIDIA's multi-process service has its pipes here: processes then compute on a GPU at once."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's own default
    return (Path(pipes) / "control").exists()


def missing_for_triton() -> list[str]:
    """Name what Triton, which compiles its launchers on the machine, does not find."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return [
        *([] if compiler else ["a C compiler (gcc)"]),
        *([] if header.is_file() else [f"{header.name} ({header.parent})"]),
    ]

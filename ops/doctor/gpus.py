"""Check that the configured GPUs exist, and that the stages fit on them together."""

import os
import platform
from collections.abc import Iterator, Sequence

from packaging.version import Version

from omnirelay.cli.output import gibibytes
from omnirelay.errors import ConfigError
from ops.doctor.finding import Finding, Findings, ok, problem, warning
from services.families.memory import Model, longest, need_of, position_bytes, weight_bytes
from shared.config import Config
from shared.devices import EngineReport, Gpu, cuda_compiler, missing_for_triton, mps_runs
from shared.engine_defaults import ALONE_UTILIZATION
from shared.messages import StageName
from shared.sharing import device_names, divide, is_shared, parallel, stages_on, utilization_of

CHECK = "device"
PLATFORMS = ("cpu", "cuda")
"""As vLLM calls them; ROCm's is "cuda" too."""
OLDEST_GLIBC = "2.34"
"""For which requirements/gpu.lock was resolved."""


def check_devices(config: Config, model: Model | None, report: EngineReport) -> Findings:
    """Check the devices of the stages, and the memory on them; ``model`` is None if it cannot be read."""
    # Within a major version of CUDA, a driver runs what is newer than itself.
    if report.cuda and report.driver and Version(report.driver).major < Version(report.cuda).major:
        what = f"the driver is for CUDA {report.driver}, PyTorch for {report.cuda}"
        advice = "install a newer driver (580 for CUDA 13), or NVIDIA's forward compatibility package"
        yield problem(CHECK, what, advice)
    if report.platform not in PLATFORMS:
        what = f"vLLM would compute on {report.platform or 'nothing'}: no stage starts"
        yield problem(CHECK, what, "see docs/deployment.md#platforms; for the CPU: `make env`")
        return
    if report.platform != "cpu":
        yield from _check_gpus(config, model, report.gpus)
        return
    named = [stage for stage in config.served_stages if config.stage(stage).devices is not None]
    if report.gpus:
        what = f"{len(report.gpus)} GPU(s), but vLLM was built for the CPU"
        yield warning(CHECK, what, "to use them: `make env DEVICE=gpu`")
    elif named:
        what = f"no GPU is visible, although `devices` is set for {', '.join(named)}"
        yield problem(CHECK, what, "remove `devices`, or check the driver with `nvidia-smi`")
    else:
        yield ok(CHECK, "no GPU: the stages compute on the CPU")


def _check_libraries() -> Findings:
    library, version = platform.libc_ver()
    if library != "glibc" or Version(version) < Version(OLDEST_GLIBC):
        what = (
            f"the C library is {library or 'unknown'} {version}, the GPU packages need glibc {OLDEST_GLIBC}"
        )
        yield problem(CHECK, what, "take Debian 12, Ubuntu 22.04, RHEL 9 or newer, or the container image")
    if missing := missing_for_triton():
        what = f"Triton compiles kernels on this machine, which lacks {' and '.join(missing)}"
        yield problem(CHECK, what, "install gcc and the headers of this Python (python3-dev)")
    if cuda_compiler() is None:
        yield ok(CHECK, "no nvcc: kernels that FlashInfer and DeepGEMM would compile are left out")


def _check_gpus(config: Config, model: Model | None, gpus: Sequence[Gpu]) -> Findings:
    yield from _check_libraries()
    inherited, count = os.environ.get("CUDA_VISIBLE_DEVICES"), len(gpus)
    placed: set[StageName] = set()
    for stage in config.served_stages:
        names = device_names(config, stage, count, inherited)
        wanted = parallel(config, stage)
        unknown = [name for name in names if name.isdecimal() and int(name) >= count]
        if unknown:
            what = f"the {stage} is given GPU {', '.join(unknown)}; there are {count}, counted from 0"
            yield problem(CHECK, what, f"correct stages.{stage}.devices, or CUDA_VISIBLE_DEVICES")
        elif len(names) < wanted:
            what = f"the {stage} computes on {wanted} GPUs and is given {len(names)}"
            yield problem(CHECK, what, f"correct stages.{stage}.devices or engine.tensor_parallel_size")
        else:
            placed.add(stage)
    for index, gpu in enumerate(gpus):
        stages = [stage for stage in stages_on(config, str(index), count, inherited) if stage in placed]
        if is_shared(config, stages):
            yield from _check_shared(config, model, stages, index, gpu)
        else:
            for stage in stages:
                yield from _check_room(config, model, stage, gpu)
                share = round(100 * _share(config, stage))
                yield ok(CHECK, f"{_called(index, gpu)}: the {stage} asks for {share}% of it")


def _check_shared(
    config: Config, model: Model | None, stages: Sequence[StageName], index: int, gpu: Gpu
) -> Findings:
    """Divide a GPU as the stages do that ``omnirelay up`` starts."""
    if model is None:
        what = f"{_called(index, gpu)}: shared by {', '.join(stages)}"
        yield warning(CHECK, what, "whether they fit is only known with the checkpoint's files")
        return
    try:
        shares = divide(gpu, [need_of(config, model, stage, gpu) for stage in stages])
    except ConfigError as error:
        yield problem(CHECK, f"GPU {index}: {error}", "see docs/models.md#on-gpus")
        return
    parts = []
    for stage, share in shares.items():
        kv = "" if share.kv_bytes is None else f" ({gibibytes(share.kv_bytes)} for the KV cache)"
        times = f"{config.stage(stage).replicas} times " if config.stage(stage).replicas > 1 else ""
        parts.append(f"{stage} {times}{gibibytes(share.nbytes)}{kv}")
    how = "at once, by NVIDIA's multi-process service" if mps_runs() else "in turns (docs/models.md#one-gpu)"
    yield ok(CHECK, f"{_called(index, gpu)} is shared, as estimated: {', '.join(parts)}; they compute {how}")


def _called(index: int, gpu: Gpu) -> str:
    return f"GPU {index}, {gpu.name}, {gibibytes(gpu.total_bytes)}"


def _check_room(config: Config, model: Model | None, stage: StageName, gpu: Gpu) -> Iterator[Finding]:
    if model is None:
        return
    needed = weight_bytes(config, model, stage)
    if stage in model.paged:
        needed += position_bytes(config, model, stage) * longest(config, model, stage)
    needed //= parallel(config, stage)
    share = int(_share(config, stage) * gpu.total_bytes)
    if needed > share:
        what = f"the {stage} needs about {gibibytes(needed)} on {gpu.name}, its share is {gibibytes(share)}"
        advice = "raise gpu_memory_utilization, lower max_model_len, or use several GPUs"
        yield problem(CHECK, what, advice)


def _share(config: Config, stage: StageName) -> float:
    """The share of a GPU that a stage asks for when it has it to itself."""
    return utilization_of(config, stage) or ALONE_UTILIZATION

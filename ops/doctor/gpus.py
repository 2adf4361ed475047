"""Check that the configured GPUs exist, and that the stages fit on them together."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence

from omnirelay.cli.output import gibibytes
from ops.doctor.checkpoint import Model
from ops.doctor.demand import longest, parallel, position_bytes, weight_bytes
from ops.doctor.finding import Finding, Findings, ok, problem, warning
from shared.config import Config
from shared.devices import EngineReport, Gpu
from shared.messages import StageName

CHECK = "device"


def check_devices(config: Config, model: Model | None, report: EngineReport) -> Findings:
    """Check the devices of the stages, and the memory on them.

    Args:
        config: The stack's.
        model: The checkpoint's; None if it cannot be read.
        report: The devices that the stages' libraries see.
    """
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


def _check_gpus(config: Config, model: Model | None, gpus: Sequence[Gpu]) -> Findings:
    shares: Counter[int] = Counter()
    for stage in config.served_stages:
        names = _devices(config, stage, len(gpus))
        wanted = parallel(config, stage)
        unknown = [name for name in names if name.isdecimal() and int(name) >= len(gpus)]
        if unknown:
            what = f"the {stage} is given GPU {', '.join(unknown)}; there are {len(gpus)}, counted from 0"
            yield problem(CHECK, what, f"correct stages.{stage}.devices, or CUDA_VISIBLE_DEVICES")
        elif len(names) < wanted:
            what = f"the {stage} computes on {wanted} GPUs and is given {len(names)}"
            yield problem(CHECK, what, f"correct stages.{stage}.devices or engine.tensor_parallel_size")
        else:
            for index in (int(name) for name in names[:wanted] if name.isdecimal()):
                shares[index] += round(100 * _share(config, stage))
                yield from _check_room(config, model, stage, gpus[index])
    for index, percent in sorted(shares.items()):
        gpu = gpus[index]
        what = f"GPU {index}, {gpu.name}, {gibibytes(gpu.total_bytes)}: the stages ask for {percent}% of it"
        if percent > 100:
            advice = "give each stage a GPU (stages.STAGE.devices), or a share (gpu_memory_utilization)"
            yield problem(CHECK, what, advice)
        else:
            yield ok(CHECK, what)


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
    engines = {
        "thinker": config.stages.thinker.engine,
        "talker": config.stages.talker.engine,
        "token2wav": config.stages.token2wav.engine,
    }
    return engines[stage].gpu_memory_utilization


def _devices(config: Config, stage: StageName, count: int) -> list[str]:
    """The GPUs that a stage sees: indices or UUIDs."""
    named = config.stage(stage).devices or os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(index) for index in range(count)] if named is None else [n.strip() for n in named.split(",")]

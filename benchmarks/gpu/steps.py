"""What a step of each stage's engine asks of the device: launches, copies, waits; and the graphs' modes.

The stages run one after the other, each in a process of its own, ``python -m benchmarks.gpu.steps STAGE
MODEL WORK``.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from benchmarks.gpu.results import PartResult, Settings, Table
from benchmarks.rehearsal.stages import ask, prepare, result_of, service_of
from omnirelay.errors import OmniRelayError
from shared.messages import STAGES, StageName

STEP_S: Final = 300.0
COUNTED: Final = {
    "operators": ("aten::",),
    "launches": ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "hipModuleLaunchKernel"),
    "graphs": ("cudaGraphLaunch", "hipGraphLaunch"),
    "copies": ("cudaMemcpy", "hipMemcpy"),
    "waits": (
        *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
        *("hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize"),
    ),
}
"""How the profiler's events are called, by what they are; launched in one graph, kernels are no launches."""
FULL: Final = "FULL"


class StageSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One request at one stage.

    Attributes:
        stage: Which.
        step_ms: How long each took, unobserved; without the first one of thinker and talker, the prompt's.
        counted: Most of each kind in one step, and the median, by the keys of :data:`COUNTED`.
        graph_mode: How vLLM captures decoding steps.
    """

    stage: StageName
    step_ms: list[float]
    counted: dict[str, list[int]]
    graph_mode: str


def main(settings: Settings) -> PartResult:
    """Observe all stages."""
    found: list[StageSteps] = []
    with tempfile.TemporaryDirectory() as work:
        for stage in STAGES:
            command = [sys.executable, "-m", "benchmarks.gpu.steps", stage, settings.model, work]
            done = subprocess.run(command, stdout=subprocess.PIPE, timeout=STEP_S, check=False)  # noqa: S603 - ours
            if done.returncode != 0:
                raise OmniRelayError(f"steps of the {stage} could not be observed: {done.returncode}")
            found.append(msgspec.json.decode(done.stdout.splitlines()[-1], type=StageSteps))
    rows: list[list[Any]] = [
        [
            *(each.stage, each.graph_mode, len(each.step_ms), median(each.step_ms)),
            *(f"{median(each.counted[kind]):g} ({max(each.counted[kind])})" for kind in COUNTED),
        ]
        for each in found
    ]
    table = Table(
        title="Steps of one request behind its prompt; counts are medians, and the most of a step",
        columns=["stage", "graphs for decoding", "steps", "step, ms", *COUNTED],
        rows=rows,
    )
    problems = []
    if settings.device != "cpu":
        problems = [
            f"the {each.stage} captures decoding steps as {each.graph_mode}, not as {FULL}"
            for each in found
            if each.stage != "token2wav" and each.graph_mode != FULL
        ]
    return PartResult(tables=[table], problems=problems)


def observe(stage: StageName, model: Path, work: Path) -> StageSteps:
    """Run one stage in this process: a warm-up, a request by the clock, and one under the profiler."""
    prepare(stage)
    import torch  # noqa: PLC0415 - the environment comes before it
    from safetensors.torch import save_file  # noqa: PLC0415 - as above
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - as above

    from benchmarks.rehearsal.results import output_of  # noqa: PLC0415 - as above

    service, sent = service_of(stage, model)
    times: list[float] = []
    counts: list[Counter[str]] = []
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    for name in ("warm-up", "timed", "profiled"):
        sent.sent.clear()
        ask(stage, service, model, work, name)
        if stage != "token2wav":
            # It computes the prompt.
            service.step()
        while service.active_requests():
            started = time.perf_counter()
            if name != "profiled":
                failures = service.step()
            else:
                with profile(activities=activities) as observed:
                    failures = service.step()
                counts.append(count({each.key: each.count for each in observed.key_averages()}))
            if failures:
                raise next(iter(failures.values()))
            if name == "timed":
                times.append(1000 * (time.perf_counter() - started))
    save_file(result_of(stage, sent), output_of(work, stage))
    # token2wav's engine is wrapped in one of its own, and nothing in it would be captured.
    captured = None if stage == "token2wav" else service._engine.vllm_config.compilation_config
    return StageSteps(
        stage=stage,
        step_ms=times,
        counted={kind: [each[kind] for each in counts] for kind in COUNTED},
        graph_mode="none" if captured is None else captured.cudagraph_mode.decode_mode().name,
    )


def count(events: dict[str, int]) -> "Counter[str]":
    """How many events of a profile there are of each kind, by their names."""
    found: Counter[str] = Counter()
    for name, times in events.items():
        for kind, prefixes in COUNTED.items():
            if name.startswith(prefixes):
                found[kind] += times
    return found


if __name__ == "__main__":
    seen = observe(msgspec.convert(sys.argv[1], StageName), Path(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.write(msgspec.json.encode(seen).decode() + "\n")
    sys.stdout.flush()
    # As a stage does: nothing depends on taking torch and vLLM down piece by piece.
    os._exit(0)

"""What a step of each stage's engine asks of the device: launches, copies, waits; and the graphs' modes.

The stages run one after the other, each in a process of its own, ``python -m benchmarks.gpu.steps STAGE
MODEL WORK``.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from benchmarks.gpu.rehearsal import CONFIGS, ask, keep_output
from benchmarks.gpu.results import PartResult, Settings
from benchmarks.measure.process import answer, in_process
from benchmarks.measure.results import Cell, Table
from benchmarks.measure.stage import service_of
from shared.messages import STAGES, StageName

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


class StageSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One request at one stage.

    Attributes:
        step_ms: How long each took, unobserved; without the first one of thinker and talker, the prompt's.
        counted: Events of each step, by the keys of :data:`COUNTED`.
        graph_mode: How vLLM captures decoding steps.
    """

    step_ms: list[float]
    counted: dict[str, list[int]]
    graph_mode: str


def main(settings: Settings) -> PartResult:
    """Observe all stages."""
    rows: list[list[Cell]] = []
    problems = []
    with tempfile.TemporaryDirectory() as work:
        for stage in STAGES:
            found = in_process(StageSteps, "benchmarks.gpu.steps", stage, settings.model, work, timeout_s=300)
            counts = [f"{median(each):g} ({max(each)})" for each in found.counted.values()]
            rows.append([stage, found.graph_mode, len(found.step_ms), median(found.step_ms), *counts])
            if settings.device != "cpu" and stage != "token2wav" and found.graph_mode != "FULL":
                problems.append(f"the {stage} captures decoding steps as {found.graph_mode}, not as FULL")
    table = Table(
        title="Steps of one request behind its prompt; counts are medians, and the most of a step",
        columns=["stage", "graphs for decoding", "steps", "step, ms", *COUNTED],
        rows=rows,
    )
    return PartResult(tables=[table], problems=problems)


def observe(stage: StageName, model: Path, work: Path) -> StageSteps:
    """Run one stage in this process: a warm-up, a request by the clock, and one under the profiler."""
    service, sink = service_of(stage, model, CONFIGS[stage], stages=1)
    import torch  # noqa: PLC0415 - the environment comes before it
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415 - as above

    times: list[float] = []
    counts: list[Mapping[str, int]] = []
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    for name in ("warm-up", "timed", "profiled"):
        sink.sent.clear()
        ask(stage, service, model, work, name)
        if stage != "token2wav":
            # It computes the prompt.
            service.step()
        while service.active_requests():
            started = time.perf_counter()
            if name != "profiled":
                failures = service.step()
            else:
                with profile(activities=[ProfilerActivity.CPU, *gpu]) as observed:
                    failures = service.step()
                counts.append(count({each.key: each.count for each in observed.key_averages()}))
            if failures:
                raise next(iter(failures.values()))
            if name == "timed":
                times.append(1000 * (time.perf_counter() - started))
    keep_output(stage, sink, work, name)
    # token2wav's engine is wrapped in one of its own, and nothing in it would be captured.
    captured = None if stage == "token2wav" else service._engine.vllm_config.compilation_config
    return StageSteps(
        step_ms=times,
        counted={kind: [each[kind] for each in counts] for kind in COUNTED},
        graph_mode="none" if captured is None else captured.cudagraph_mode.decode_mode().name,
    )


def count(events: Mapping[str, int]) -> "Counter[str]":
    """How many events of a profile there are of each kind, by their names."""
    found: Counter[str] = Counter()
    for name, times in events.items():
        for kind, prefixes in COUNTED.items():
            if name.startswith(prefixes):
                found[kind] += times
    return found


if __name__ == "__main__":
    answer(observe(msgspec.convert(sys.argv[1], StageName), Path(sys.argv[2]), Path(sys.argv[3])))

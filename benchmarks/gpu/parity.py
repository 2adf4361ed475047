"""Every stage of the checkpoint beside transformers, on the device, each in a process of its own."""

import tempfile
from pathlib import Path
from typing import Final

import psutil

from benchmarks.gpu.reference import ReferenceRun
from benchmarks.gpu.rehearsal import StageRun
from benchmarks.gpu.results import Device, PartResult, Settings
from benchmarks.measure.process import in_process
from benchmarks.measure.results import Cell, Table, tell
from omnirelay.errors import OmniRelayError
from services.families.memory import DTYPE_BYTES, read_model
from shared.messages import STAGES, StageName

REFERENCE_S: Final[dict[Device, float]] = {"cuda": 240.0, "cpu": 1800.0}
"""For transformers, for each stage: where one takes longer, the others are compared all the same."""
LIBRARIES_BYTES: Final = 2 * 2**30
"""What a process needs beside the weights: libraries, a small KV cache, what a step takes."""


def main(settings: Settings) -> PartResult:
    """Load and run every stage, and compare each with transformers.

    Raises:
        OmniRelayError: A stage failed, or there is too little memory for it.
    """
    model = Path(settings.model)
    runs: list[StageRun] = []
    compared: list[list[Cell]] = []
    problems = []
    with tempfile.TemporaryDirectory() as work:
        for stage in STAGES:
            require_memory(model, stage, settings.device)
            tell(f"{stage}: omnirelay")
            runs.append(in_process(StageRun, "benchmarks.gpu.rehearsal", stage, model, work))
        limit_s = REFERENCE_S[settings.device]
        for stage in STAGES:
            tell(f"{stage}: transformers")
            reference = ("benchmarks.gpu.reference", stage, model, work, settings.device)
            try:
                found = in_process(ReferenceRun, *reference, timeout_s=limit_s)
            except OmniRelayError as error:
                problems.append(f"{stage}: {error}")
                continue
            runs.append(found.run)
            for each in found.comparisons:
                compared.append([stage, each.what, each.equal, each.count, each.difference, each.limit])
                if not each.passed:
                    problems.append(f"{stage}: {each.what}")
    columns = ["stage", "program", "load, s", "run, s", "peak memory, GiB", "on the GPU, GiB"]
    rows: list[list[Cell]] = [
        [run.stage, run.program, run.load_s, run.run_s, run.peak_gib, run.gpu_gib] for run in runs
    ]
    ran = Table(title="Each stage in a process of its own", columns=columns, rows=rows)
    columns = ["stage", "what", "equal", "of", "difference", "limit"]
    table = Table(title="Compared with transformers", columns=columns, rows=compared)
    waits: list[list[Cell]] = [[run.stage, *each] for run in runs for each in run.waits.items()]
    waited = Table(title="Where the host waits within steps", columns=["stage", "where", "times"], rows=waits)
    return PartResult(tables=[ran, table, waited], problems=problems)


def require_memory(model: Path, stage: StageName, device: Device) -> None:
    """Refuse to load a stage that would take more memory than is free.

    Raises:
        OmniRelayError: It would.
    """
    if device != "cpu":
        return
    found = read_model(model)
    width = 4 if stage == "token2wav" else DTYPE_BYTES.get(found.dtype, 4)
    needed, free = found.weights.elements[stage] * width + LIBRARIES_BYTES, psutil.virtual_memory().available
    if needed > free:
        raise OmniRelayError(
            f"the {stage} needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free: "
            "end what else runs, or take a machine with more memory"
        )

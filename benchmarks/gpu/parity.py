"""Every stage of the checkpoint beside transformers, on the device: the rehearsal."""

from pathlib import Path

from benchmarks.gpu.results import PartResult, Settings, Table
from benchmarks.rehearsal.__main__ import rehearse


def main(settings: Settings) -> PartResult:
    """Rehearse."""
    result = rehearse(settings.checkpoint, settings.device, Path(settings.model))
    runs = Table(
        title="Each stage in a process of its own",
        columns=["stage", "program", "load, s", "run, s", "peak memory, GiB", "on the GPU, GiB"],
        rows=[
            [run.stage, run.program, run.load_s, run.run_s, run.peak_gib, run.gpu_gib] for run in result.runs
        ],
    )
    compared = Table(
        title="Compared with transformers",
        columns=["stage", "what", "equal", "of", "difference", "limit"],
        rows=[
            [each.stage, each.what, each.equal, each.count, each.difference, each.limit]
            for each in result.comparisons
        ],
    )
    problems = [f"{each.stage}: {each.what}" for each in result.comparisons if not each.passed]
    return PartResult(tables=[runs, compared], problems=problems)

"""What a rehearsal finds."""

from pathlib import Path
from typing import Final

import msgspec

from benchmarks.measure.machine import MachineFacts
from shared.messages import StageName

SPEAKER: Final = "Ethan"
SEED: Final = 11


class StageRun(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, loaded and run in a process of its own.

    Attributes:
        stage: Which.
        program: ``omnirelay`` or ``transformers``.
        load_s: Seconds to load it, libraries apart.
        run_s: Seconds for its answer.
        peak_gib: Largest resident set of the process, pages of files that were mapped included.
        gpu_gib: Most that it took of a GPU; none on a CPU.
    """

    stage: StageName
    program: str
    load_s: float
    run_s: float
    peak_gib: float
    gpu_gib: float | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Something of OmniRelay's beside transformers'.

    Attributes:
        stage: Whose.
        what: What was compared, and how the difference is measured.
        count: How many tokens, numbers or samples.
        equal: How many are equal to the last bit.
        difference: The largest difference; none if they cannot be compared: another shape, or no numbers.
        limit: The largest that passes.
    """

    stage: StageName
    what: str
    count: int
    equal: int
    difference: float | None
    limit: float

    @property
    def passed(self) -> bool:
        """Whether it is right."""
        return self.difference is not None and self.difference <= self.limit


class ReferenceRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a process with transformers tells: how it ran, and what it found."""

    run: StageRun
    comparisons: list[Comparison]


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """All of it.

    Attributes:
        size: The checkpoint's.
        device: ``cpu`` or ``cuda``.
        machine: Where.
        made_s: Seconds to make the checkpoint; none if it was there.
        runs: Every process.
        comparisons: Every comparison.
    """

    size: str
    device: str
    machine: MachineFacts
    made_s: float | None
    runs: list[StageRun]
    comparisons: list[Comparison]

    @property
    def passed(self) -> bool:
        """Whether all is right."""
        return bool(self.comparisons) and all(each.passed for each in self.comparisons)


def output_of(work: Path, stage: StageName) -> Path:
    """The file with what a stage of OmniRelay made."""
    return work / f"{stage}.safetensors"


def report(result: Rehearsal) -> str:
    """The rehearsal as tables in Markdown."""
    machine = result.machine
    lines = [
        f"# Rehearsal: {result.size} on {result.device}",
        "",
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, load {machine.load} before; "
        + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
        "",
        "| stage | program | load, s | run, s | peak memory, GiB | on the GPU, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for run in result.runs:
        gpu = "" if run.gpu_gib is None else f"{run.gpu_gib:.1f}"
        lines.append(
            f"| {run.stage} | {run.program} | {run.load_s:.1f} | {run.run_s:.1f} | {run.peak_gib:.1f} | "
            f"{gpu} |"
        )
    lines += ["", "| stage | compared | equal | largest difference | limit | |", "|---|---|---|---|---|---|"]
    for each in result.comparisons:
        verdict = "passed" if each.passed else "FAILED"
        difference = "none" if each.difference is None else f"{each.difference:.2g}"
        lines.append(
            f"| {each.stage} | {each.what} | {each.equal} of {each.count} | {difference} | "
            f"{each.limit:.2g} | {verdict} |"
        )
    return "\n".join(lines) + "\n"

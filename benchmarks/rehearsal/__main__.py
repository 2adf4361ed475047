"""``python -m benchmarks.rehearsal``: see ``--help``."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from benchmarks.measure.machine import this_machine
from benchmarks.measure.output import tell
from benchmarks.rehearsal.results import Comparison, ReferenceRun, Rehearsal, StageRun, report
from omnirelay.errors import CheckpointError, OmniRelayError
from services.families.sizes import DTYPE_BYTES, read_model
from shared.messages import STAGES, StageName

RESULTS: Final = Path("out/rehearsal")
CHECKPOINTS: Final = Path(".cache/omnirelay/benchmarks")
STEP_S: Final = 1800.0
"""Of one process; on a busy machine the reference of a large token2wav takes many minutes."""
LIBRARIES_BYTES: Final = 2 * 2**30
"""What a process needs beside the weights: libraries, a small KV cache, what a step takes."""
T = TypeVar("T")


def rehearse(size: str, device: str, model: Path | None = None) -> Rehearsal:
    """Load and run every stage of a random checkpoint, and compare each with transformers.

    Args:
        size: The checkpoint's, as ``omnirelay checkpoint`` has them.
        device: ``cpu`` or ``cuda``.
        model: Where it is, or is made.

    Raises:
        OmniRelayError: A process failed, or there is too little memory for it.
    """
    machine = this_machine()
    directory = model or CHECKPOINTS / size
    made_s = _ensure(size, directory)
    runs: list[StageRun] = []
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory() as work:
        for stage in STAGES:
            require_memory(directory, stage, device)
            tell(f"{stage}: omnirelay")
            runs.append(_run(StageRun, "stages", stage, str(directory), work))
            tell(f"{stage}: transformers")
            found = _run(ReferenceRun, "reference", stage, str(directory), work, device)
            runs.append(found.run)
            comparisons += found.comparisons
    return Rehearsal(
        size=size, device=device, machine=machine, made_s=made_s, runs=runs, comparisons=comparisons
    )


def require_memory(model: Path, stage: StageName, device: str) -> None:
    """Refuse to load a stage that would take more memory than is free.

    Raises:
        OmniRelayError: It would.
    """
    if device != "cpu":
        return
    found = read_model(model)
    width = 4 if stage == "token2wav" else DTYPE_BYTES.get(found.dtype, 4)
    needed = found.weights.elements[stage] * width + LIBRARIES_BYTES
    if needed > available_bytes():
        raise OmniRelayError(
            f"the {stage} needs {needed / 2**30:.1f} GiB, and {available_bytes() / 2**30:.1f} GiB are free: "
            "end what else runs, or take a machine with more memory"
        )


def available_bytes() -> int:
    """Memory that can be had without swapping, by the kernel's estimate."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OmniRelayError("/proc/meminfo does not say how much memory is available")


def _ensure(size: str, directory: Path) -> float | None:
    if (directory / "config.json").is_file():
        return None
    tell(f"making the checkpoint {size} in {directory}")
    started = time.perf_counter()
    made = subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-m", "checkpoint", str(directory), "--size", size],
        stdout=subprocess.DEVNULL,
        timeout=STEP_S,
        check=False,
    )
    if made.returncode != 0:
        raise CheckpointError(f"the checkpoint {directory} could not be made; its maker's words are above")
    return time.perf_counter() - started


def _run(kind: type[T], module: str, *arguments: str) -> T:
    """Run one part in a process of its own, which gives back all of its memory."""
    command = [sys.executable, "-m", f"benchmarks.rehearsal.{module}", *arguments]
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            command, stdout=subprocess.PIPE, timeout=STEP_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OmniRelayError(f"{' '.join(command[2:])} took more than {STEP_S:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise OmniRelayError(f"{' '.join(command[2:])} ended with {done.returncode}; its words are above")
    return msgspec.json.decode(lines[-1], type=kind)


def keep(result: Any, text: str, directory: Path, name: str) -> None:
    """Write a result, as JSON and as text."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    (directory / f"{name}.md").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse; return the exit status, 1 if something is not equal."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rehearsal",
        description="Load a random checkpoint stage by stage, and compare each with transformers.",
    )
    parser.add_argument("--size", choices=("3b", "bench", "small", "tiny"), default="3b")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where it computes (default: cpu)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="the checkpoint, made if it is not there")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    options = parser.parse_args(arguments)
    try:
        result = rehearse(options.size, options.device, options.model)
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    keep(result, report(result), options.out, f"{options.size}-{options.device}")
    sys.stdout.write(report(result))
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())

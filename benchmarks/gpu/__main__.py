"""``python -m benchmarks.gpu``: see ``--help``."""

import argparse
import importlib.util
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.gpu.part import PARTS, WITHOUT_VLLM
from benchmarks.gpu.report import report
from benchmarks.gpu.results import FinishedPart, PartResult, Settings, Table
from benchmarks.gpu.sampling import Sampler
from benchmarks.measure.machine import this_machine
from benchmarks.measure.output import tell

RESULTS: Final = Path("out/gpu")
CHECKPOINTS: Final = Path(".cache/omnirelay/benchmarks")
PART_S: Final = 600.0
CHECKPOINT_S: Final = 1800.0
CLIENTS: Final = {"3b": [1, 2, 4, 8, 16, 32, 64], "tiny": [1, 2]}
SECONDS: Final = {"3b": 5.0, "tiny": 2.56}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that have not run yet; return the exit status, 1 unless all have passed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    settings = Settings(
        device=options.device,
        checkpoint=options.checkpoint,
        model=str(options.model or CHECKPOINTS / options.checkpoint),
        clients=options.clients or CLIENTS[options.checkpoint],
        seconds=SECONDS[options.checkpoint],
    )
    options.out.mkdir(parents=True, exist_ok=True)
    if not (Path(settings.model) / "config.json").is_file():
        tell(f"making the checkpoint {settings.checkpoint} in {settings.model}")
        command = [sys.executable, "-m", "checkpoint", settings.model, "--size", settings.checkpoint]
        made = subprocess.run(  # noqa: S603 - our own program
            command, stdout=subprocess.DEVNULL, timeout=CHECKPOINT_S, check=False
        )
        if made.returncode != 0:
            return made.returncode
    finished: list[FinishedPart] = []
    missing: list[str] = []
    for name in options.parts or PARTS:
        path = options.out / f"{name}.json"
        kept = None if options.again else read_finished(path, settings)
        if kept is not None:
            tell(f"{name}: done before, {path}")
        elif name not in WITHOUT_VLLM and importlib.util.find_spec("vllm") is None:
            missing.append(f"{name}: vLLM is not installed")
        else:
            tell(name)
            outcome = run_part(name, settings)
            if isinstance(outcome, str):
                missing.append(f"{name}: {outcome}")
            else:
                kept = outcome
                path.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
        if kept is not None:
            finished.append(kept)
        text = report(this_machine(), device_name(settings.device), finished, missing)
        (options.out / "report.md").write_text(text, encoding="utf-8")
    encoded = msgspec.json.encode({"parts": finished, "missing": missing})
    (options.out / "report.json").write_bytes(msgspec.json.format(encoded) + b"\n")
    sys.stdout.write(text)
    return 1 if missing or any(part.result.problems for part in finished) else 0


def read_finished(path: Path, settings: Settings) -> FinishedPart | None:
    """A part that has run to its end with these settings; none if it has not, or did not pass."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=FinishedPart)
    except (FileNotFoundError, msgspec.DecodeError):
        # It has not run, or was written by another version.
        return None
    return kept if kept.settings == settings and not kept.result.problems else None


def run_part(name: str, settings: Settings) -> FinishedPart | str:
    """Run one part in a process of its own; gives what it found, or why it found nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu.part", name, msgspec.json.encode(settings).decode()]
    started = time.monotonic()
    with Sampler() as sampler:
        try:
            done = subprocess.run(  # noqa: S603 - our own program
                command, stdout=subprocess.PIPE, timeout=PART_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"took more than {PART_S:.0f} s"
    gpu: list[Table] = sampler.tables()
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        return f"ended with exit status {done.returncode}; its words are above"
    result = msgspec.json.decode(lines[-1], type=PartResult)
    return FinishedPart(
        name=name, settings=settings, result=result, wall_s=time.monotonic() - started, gpu=gpu
    )


def device_name(device: str) -> str:
    """What the device is called."""
    import torch  # noqa: PLC0415 - parts run in processes of their own; nothing else here needs it

    if device == "cpu":
        return "CPU"
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU that PyTorch sees"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Show on a GPU that OmniRelay is right there, and how fast: one report of all parts.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda; ROCm's is cuda, too"
    )
    parser.add_argument(
        "--checkpoint", choices=tuple(CLIENTS), default="3b", help="random weights (default: 3b)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="the checkpoint, made if it is not there")
    parser.add_argument("--clients", type=int, nargs="+", metavar="N", help="clients at once, one load each")
    parser.add_argument("--again", action="store_true", help="run parts again that have passed")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help=f"default: {RESULTS}")
    return parser


if __name__ == "__main__":
    sys.exit(main())

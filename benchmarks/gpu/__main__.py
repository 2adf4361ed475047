"""``python -m benchmarks.gpu``: see ``--help``."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.gpu.part import PARTS, WITHOUT_VLLM
from benchmarks.gpu.results import FinishedPart, PartResult, Sampler, Settings
from benchmarks.measure.checkpoints import DIRECTORY, make
from benchmarks.measure.machine import MachineFacts, this_machine
from benchmarks.measure.process import in_process
from benchmarks.measure.results import keep, page, tell
from omnirelay.errors import OmniRelayError

PART_S: Final = 1200.0
"""The first stages on a GPU compile for minutes."""
REHEARSAL_S: Final = 7200.0
"""On a busy CPU the reference of a large token2wav takes many minutes."""
CLIENTS: Final = {"3b": [1, 2, 4, 8, 16, 32, 64], "bench": [1, 8], "small": [1, 8], "tiny": [1, 2]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that have not run yet; return the exit status, 1 unless all have passed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    settings = Settings(
        device=options.device,
        checkpoint=options.checkpoint,
        model=str(options.model or DIRECTORY / options.checkpoint),
        clients=options.clients or CLIENTS[options.checkpoint],
        seconds=2.56 if options.checkpoint == "tiny" else 5.0,
    )
    finished: list[FinishedPart] = []
    missing: list[str] = []
    try:
        if not (Path(settings.model) / "config.json").is_file():
            make(settings.checkpoint, Path(settings.model))
    except OmniRelayError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.parts or PARTS:
        path = options.out / f"{name}.json"
        kept = None if options.again else read_finished(path, settings)
        if kept is not None:
            tell(f"{name}: done before, {path}")
        elif name not in WITHOUT_VLLM and importlib.util.find_spec("vllm") is None:
            missing.append(f"{name}: vLLM is not installed")
        else:
            tell(name)
            try:
                kept = run_part(name, settings)
                path.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
            except OmniRelayError as error:
                missing.append(f"{name}: {error}")
        if kept is not None:
            finished.append(kept)
    text = report(this_machine(), device_name(settings.device), finished, missing)
    keep(options.out, "report", text, {"parts": finished, "missing": missing})
    return 1 if missing or any(part.result.problems for part in finished) else 0


def read_finished(path: Path, settings: Settings) -> FinishedPart | None:
    """A part that has run to its end with these settings; none if it has not, or did not pass."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=FinishedPart)
    except (FileNotFoundError, msgspec.DecodeError):
        # It has not run, or was written by another version.
        return None
    return kept if kept.settings == settings and not kept.result.problems else None


def run_part(name: str, settings: Settings) -> FinishedPart:
    """Run one part in a process of its own.

    Raises:
        OmniRelayError: It found nothing.
    """
    started, encoded = time.monotonic(), msgspec.json.encode(settings).decode()
    timeout_s = REHEARSAL_S if settings.device == "cpu" else PART_S
    with Sampler() as sampler:
        result = in_process(PartResult, "benchmarks.gpu.part", name, encoded, timeout_s=timeout_s)
    wall_s = time.monotonic() - started
    return FinishedPart(name=name, settings=settings, result=result, wall_s=wall_s, gpu=sampler.tables())


def report(machine: MachineFacts, device: str, parts: Sequence[FinishedPart], missing: Sequence[str]) -> str:
    """Write the report: parts that ran to their end, and why others have not."""
    shown: list[object] = []
    for part in parts:
        verdict = "FAILED" if part.result.problems else "passed"
        settings = f"checkpoint {part.settings.checkpoint}, {part.settings.device}; {part.wall_s:.0f} s"
        problems = [f"- {problem}" for problem in part.result.problems]
        shown += ["\n".join([f"# {part.name}: {verdict}", "", settings, *problems])]
        shown += [*part.result.tables, *part.gpu]
    if missing:
        shown.append("\n".join(["# Not run", "", *(f"- {reason}" for reason in missing)]))
    return page(device, machine, shown)


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
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda; ROCm's is cuda, too")
    add("--checkpoint", "--size", choices=tuple(CLIENTS), default="3b", help="random weights (default: 3b)")
    add("--model", type=Path, metavar="DIR", help="the checkpoint, made if it is not there")
    add("--clients", type=int, nargs="+", metavar="N", help="clients at once, one load each")
    add("--again", action="store_true", help="run parts again that have passed")
    add("--out", type=Path, default=Path("out/gpu"), metavar="DIR", help="default: out/gpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Command line: ``python -m checkpoint DIR [--family NAME] [--size NAME] [--seed N]``."""

import argparse
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
import transformers

from checkpoint import BENCH, SMALL, TINY, qwen3_omni, write_checkpoint, write_large
from checkpoint.compact import expand
from checkpoint.qwen3_omni import write_qwen3_omni
from omnirelay.errors import CheckpointError, OmniRelayError
from shared.model_files import read_weights

_PACKAGED = Path(__file__).parent / "speaking"


def _write_speaking(directory: Path, _seed: int) -> None:
    if not _PACKAGED.is_dir():
        raise CheckpointError(f"no trained checkpoint is installed: there is no {_PACKAGED}")
    expand(_PACKAGED, directory)


_FAMILIES: Final[dict[str, dict[str, Callable[[Path, int], None]]]] = {
    "qwen2.5-omni": {
        "tiny": lambda directory, seed: write_checkpoint(directory, TINY, seed),
        "small": lambda directory, seed: write_checkpoint(directory, SMALL, seed),
        "bench": lambda directory, seed: write_checkpoint(directory, BENCH, seed),
        "3b": lambda directory, seed: write_large(directory, seed=seed),
        "speaking": _write_speaking,
    },
    "qwen3-omni": {
        "tiny": lambda directory, seed: write_qwen3_omni(directory, qwen3_omni.TINY, seed),
        "small": lambda directory, seed: write_qwen3_omni(directory, qwen3_omni.SMALL, seed),
    },
}
"""What writes a checkpoint, by family and size."""


def main(arguments: list[str] | None = None) -> int:
    """Write the requested checkpoint; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoint",
        description="Write a checkpoint: a random one, or the trained one (speaking).",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="new, empty, or an earlier checkpoint")
    parser.add_argument("--family", choices=list(_FAMILIES), default="qwen2.5-omni")
    parser.add_argument("--size", choices=list(_FAMILIES["qwen2.5-omni"]), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("checkpoint").setLevel(logging.INFO)
    # Several threads busy-wait for each other: on a loaded machine the tiny one took 15 s instead of 1.
    torch.set_num_threads(1)
    # transformers warns of each text id in the talker's config, where the released model has them too.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        sizes = _FAMILIES[options.family]
        if options.size not in sizes:
            raise CheckpointError(f"sizes of {options.family} are {', '.join(sizes)}, not {options.size}")
        sizes[options.size](options.directory, options.seed)
    except (OmniRelayError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    try:
        # Unlike a write, it may find the standard output closed.
        print(_summary(options.directory), end="", flush=True)  # noqa: T201
    except OSError as error:
        sys.stderr.write(f"error: cannot write to the standard output: {error.strerror}\n")
        # Prevents a second attempt to flush it at exit.
        sys.stdout = None
        return 1
    return 0


def _summary(directory: Path) -> str:
    files = sorted(directory.iterdir())
    lines = [f"{path.stat().st_size:>13,}  {path.name}" for path in files]
    total = sum(path.stat().st_size for path in files)
    parameters = sum(read_weights(directory).elements.values())
    lines.append(f"{total:>13,}  bytes in {directory}; {parameters / 1e6:.1f} million parameters")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

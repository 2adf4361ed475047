"""The random checkpoints that are measured, made when they are missing or of another shape.

``python -m benchmarks.measure.checkpoints SIZE DIR`` makes one, if needed.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointError
from shared.model_files import read_weights

SIZES: Final = ("bench", "small", "tiny")
QWEN3: Final = "qwen3-small"
DIRECTORY: Final = Path(".cache/omnirelay/benchmarks")


def make(size: str, directory: Path) -> None:
    """Make a checkpoint if it is not there.

    Raises:
        CheckpointError: It could not be made.
    """
    command = [sys.executable, "-m", "benchmarks.measure.checkpoints", size, str(directory)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # noqa: S603 - ours
    if done.returncode != 0:
        raise CheckpointError(f"the checkpoint {directory} could not be made; its maker's messages are above")


async def ensure(size: str) -> Path:
    """Return the directory of a size, whose checkpoint is made if it is not there.

    Raises:
        CheckpointError: It could not be made.
    """
    await asyncio.to_thread(make, size, DIRECTORY / size)
    return DIRECTORY / size


def parameters(directory: Path) -> int:
    """Parameters of a checkpoint."""
    return sum(read_weights(directory).elements.values())


def main(size: str, directory: Path) -> int:
    """Make a checkpoint whose recipe is not this size's; return the exit status."""
    import dataclasses  # noqa: PLC0415 - only this process needs what follows

    from checkpoint import BENCH, RECIPE_FILE, SMALL, TINY, qwen3_omni  # noqa: PLC0415 - loads torch
    from checkpoint.__main__ import main as write  # noqa: PLC0415 - as above

    shapes: dict[str, Any] = {"bench": BENCH, "small": SMALL, "tiny": TINY, QWEN3: qwen3_omni.SMALL}
    recipe, family = directory / RECIPE_FILE, ["--family", "qwen3-omni"] if size == QWEN3 else []
    if recipe.is_file():
        shape = dataclasses.asdict(shapes[size]) if size in shapes else {}
        found = json.loads(recipe.read_text(encoding="utf-8"))
        if size not in shapes or (found["seed"], found["shape"]) == (0, json.loads(json.dumps(shape))):
            return 0
    sys.stderr.write(f"making the checkpoint {size} in {directory} ...\n")
    return write([str(directory), *family, "--size", size.removeprefix("qwen3-")])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))

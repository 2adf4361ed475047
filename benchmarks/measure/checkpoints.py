"""The random checkpoints that are measured, made when they are missing or of another shape.

``python -m benchmarks.measure.checkpoints SIZE DIR`` makes one, if needed.
"""

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Final

from omnirelay.errors import CheckpointError

SIZES: Final = ("bench", "small", "tiny")
DIRECTORY: Final = Path(".cache/omnirelay/benchmarks")
_LENGTH_BYTES: Final = 8


async def ensure(size: str) -> Path:
    """Make a checkpoint if it is not there.

    Raises:
        CheckpointError: It could not be made.
    """
    directory = DIRECTORY / size
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.measure.checkpoints", size, str(directory))
    )
    if await process.wait() != 0:
        raise CheckpointError(f"the checkpoint {directory} could not be made; its maker's words are above")
    return directory


def parameters(directory: Path) -> int:
    """Parameters of a checkpoint, from the head of its file."""
    with (directory / "model.safetensors").open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        head = json.loads(file.read(length))
    return sum(math.prod(each["shape"]) for name, each in head.items() if name != "__metadata__")


def main(size: str, directory: Path) -> None:
    """Make a checkpoint whose recipe is not this size's."""
    import dataclasses  # noqa: PLC0415 - only this process needs what follows

    import transformers  # noqa: PLC0415 - as above

    from checkpoint import BENCH, RECIPE_FILE, SMALL, TINY, write_checkpoint  # noqa: PLC0415 - loads torch

    shape = {"bench": BENCH, "small": SMALL, "tiny": TINY}[size]
    recipe = directory / RECIPE_FILE
    wanted = json.loads(json.dumps({"seed": 0, "shape": dataclasses.asdict(shape)}))
    if recipe.is_file():
        made = json.loads(recipe.read_text(encoding="utf-8"))
        if {key: made.get(key) for key in wanted} == wanted:
            return
    sys.stderr.write(f"making the checkpoint {size} in {directory} ...\n")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    write_checkpoint(directory, shape)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

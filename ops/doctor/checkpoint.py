"""The checkpoint's files: all there, and whole."""

import logging
from pathlib import Path
from typing import Final

from gateway.input.prompt import TEMPLATE_FILES
from omnirelay.cli.output import mebibytes
from omnirelay.errors import CheckpointAccessError, CheckpointError
from ops.doctor.finding import Finding, ok, problem, warning
from services.families.known import family_of
from services.families.memory import Model, read_model
from shared.checkpoints import (
    TOKENIZER_FILES,
    find_model,
    is_hub_id,
    read_config,
    require_readable,
    weight_files,
)
from shared.config import DEFAULT_CHECKPOINT, Config
from shared.model_files import MODEL_PATTERNS
from shared.tokenizer import tokenizer_files

CHECK: Final = "checkpoint"
AGAIN: Final = "copy or download the checkpoint again"
EXPAND: Final = "this is its compact form: run `omnirelay checkpoint --size speaking DIR`, and choose DIR"
COMPACT_FILE: Final = "compact.safetensors"
"""As in :mod:`checkpoint.compact`, which loads PyTorch."""
log = logging.getLogger(__name__)
READABLE: Final = "change the owner or the permissions of the files, or run as another user"


def examine(config: Config) -> tuple[Model | None, list[Finding]]:
    """Look at the configured checkpoint, without fetching or loading anything.

    Returns:
        What it says of the model, if it can be read, and what was found.
    """
    try:
        directory = find_model(config)
        if directory is None:
            return None, [_absent(config)]
        require_readable(directory, (*TOKENIZER_FILES, *MODEL_PATTERNS))
    except CheckpointAccessError as error:
        return None, [problem(CHECK, str(error), READABLE)]
    missing = _missing(directory)
    again = f"`rm -r {directory}`: `omnirelay up` makes it again" if config.model is None else AGAIN
    if missing and config.model is not None and is_hub_id(config.model) and not Path(config.model).exists():
        what = f"the copy of {config.model} in {directory} lacks {', '.join(missing)}"
        return None, [warning(CHECK, what, "the stages fetch them when they start; it takes a while")]
    if missing:
        advice = EXPAND if (directory / COMPACT_FILE).is_file() else again
        return None, [problem(CHECK, f"{directory} lacks {', '.join(missing)}", advice)]
    try:
        model = read_model(directory, stages=config.served_stages)
    except CheckpointError as error:
        return None, [problem(CHECK, f"{directory}: {error}", again)]
    size = f"{mebibytes(model.weights.nbytes)} of weights, {model.dtype}"
    return model, [ok(CHECK, f"{directory} is complete: {size}")]


def _absent(config: Config) -> Finding:
    if config.model is None:
        what = f"no model is chosen, and {DEFAULT_CHECKPOINT.absolute()} is not there"
        return warning(CHECK, what, "`omnirelay up` makes it")
    if is_hub_id(config.model):
        what = f"{config.model} is not on this machine"
        return warning(CHECK, what, "it is fetched from the Hugging Face hub at the start; it takes a while")
    return problem(CHECK, f"there is no directory {config.model}", "correct `model`, or OMNI_MODEL")


def _files(directory: Path) -> tuple[str, ...]:
    """Names of the files that the stages read; without a family only that which names it."""
    try:
        return family_of(read_config(directory)).files
    except CheckpointError as error:
        log.debug("no family: %s", error)
        return ("config.json",)


def _missing(directory: Path) -> list[str]:
    """Names of the files that some process reads and that are not there."""
    missing = [
        name for name in (*_files(directory), *tokenizer_files(directory)) if not (directory / name).is_file()
    ]
    if not any((directory / name).is_file() for name in TEMPLATE_FILES):
        missing.append(" or ".join(TEMPLATE_FILES))
    try:
        return missing + [path.name for path in weight_files(directory) if not path.is_file()]
    except CheckpointError as error:
        return [*missing, f"a readable index ({error})"]

"""Weights that a training starts from: those of a finished checkpoint, compact or not."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from checkpoint.compact import COMPACT_FILE, expand
from labs.training.parts.vocabulary import SharedRows
from omnirelay.errors import CheckpointError

WEIGHTS = "model.safetensors"


def start_from(checkpoint: Path, state: Path) -> None:
    """Keep ``checkpoint`` in ``state``, where nothing may have been trained without it.

    Raises:
        CheckpointError: ``state`` was begun otherwise, or ``checkpoint`` is no compact checkpoint.
    """
    if origin_of(state) is not None:
        return
    if any(state.glob("*.state.pt")):
        raise CheckpointError(
            f"{state} holds a training from nothing; --from needs a state directory of its own"
        )
    if not (checkpoint / COMPACT_FILE).is_file():
        raise CheckpointError(f"{checkpoint} holds no {COMPACT_FILE}; --from takes a compact checkpoint")
    expand(checkpoint, state / "origin")


def origin_of(state: Path) -> Path | None:
    """Return the checkpoint that the training in ``state`` started from, if any."""
    return state / "origin" if (state / "origin" / WEIGHTS).is_file() else None


@torch.no_grad()
def copy_origin(origin: Path, model: nn.Module, prefix: str = "") -> None:
    """Put the weights of a checkpoint whose names begin with ``prefix`` into ``model``.

    A matrix that has a row for every id becomes shared rows where ``model`` has such.
    """
    weights = load_file(origin / WEIGHTS)
    rows = {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, SharedRows)}
    for name, parameter in model.named_parameters():
        whole = weights[f"{prefix}{name}"]
        parameter.copy_(rows[name].rows_of(whole) if name in rows else whole)

"""What a checkpoint's ``config.json`` says of the model's size."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnirelay.errors import CheckpointError
from shared.messages import StageName


@dataclass(frozen=True)
class Paged:
    """What a stage's KV cache holds for each position; see ``docs/operations.md``.

    Attributes:
        positions: Most positions of one request, as the checkpoint has it.
        elements: Numbers a position: keys and values of all layers, and a conditioning row.
    """

    positions: int
    elements: int


def read_config(directory: Path) -> dict[str, Any]:
    """Read the checkpoint's ``config.json``.

    Raises:
        CheckpointError: It cannot be read, or is not Qwen2.5-Omni's.
    """
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind = values.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    if kind != "qwen2_5_omni":
        raise CheckpointError(f"{path.name} is of a model of type {kind!r}, not 'qwen2_5_omni'")
    checked: dict[str, Any] = values
    return checked


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype that the checkpoint is kept in."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def paged(config: Mapping[str, Any]) -> dict[StageName, Paged]:
    """What the thinker and the talker keep in their KV caches.

    Raises:
        CheckpointError: ``config.json`` lacks a value.
    """
    try:
        thinker = config["thinker_config"]["text_config"]
        talker = config["talker_config"]
        width = int(thinker["hidden_size"])
        heads = int(thinker["num_attention_heads"])
        return {
            "thinker": _paged(thinker, thinker.get("head_dim") or width // heads, width),
            "talker": _paged(talker, talker["head_dim"], talker["embedding_size"]),
        }
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json lacks a value, or has a strange one: {error!r}") from error


def _paged(config: Mapping[str, Any], head_dim: int, row: int) -> Paged:
    keys_and_values = (
        2 * int(config["num_hidden_layers"]) * int(config["num_key_value_heads"]) * int(head_dim)
    )
    return Paged(int(config["max_position_embeddings"]), keys_and_values + int(row))

"""The weights of a checkpoint, as far as their files' headers tell: nothing is loaded."""

import json
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.checkpoints import WEIGHT_INDEX, weight_files, weight_map
from shared.errors import CheckpointError
from shared.messages import STAGES, StageName

MAX_HEADER_BYTES: Final = 100_000_000
"""As the safetensors library itself has it."""
ELEMENT_BYTES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
}
_LFS_POINTER: Final = b"version https://git-lfs"


@dataclass(frozen=True)
class Weights:
    """What the stages load.

    Attributes:
        nbytes: Of all files.
        elements: Numbers of each stage.
    """

    nbytes: int
    elements: Mapping[str, int]


@dataclass(frozen=True)
class Paged:
    """What a stage's KV cache holds for each position; see ``docs/operations.md``.

    Attributes:
        positions: Most positions of one request, as the checkpoint has it.
        elements: Numbers a position: keys and values of all layers, and a conditioning row.
    """

    positions: int
    elements: int


def read_weights(directory: Path) -> Weights:
    """Read the headers of all files with weights.

    Raises:
        CheckpointError: A file is missing, cut short or no safetensors file, or a tensor is not where the
            index says; the message says which.
    """
    elements: Counter[str] = Counter()
    nbytes = 0
    place: dict[str, str] = {}
    for path in weight_files(directory):
        for name, count in _read_header(path):
            elements[name.partition(".")[0]] += count
            place[name] = path.name
        nbytes += path.stat().st_size
    index = directory / WEIGHT_INDEX
    promised = weight_map(index) if index.is_file() else {}
    lost = [name for name, file in promised.items() if place.get(name) != file]
    if lost:
        raise CheckpointError(f"{promised[lost[0]]} lacks {lost[0]}, which {WEIGHT_INDEX} says is in it")
    if absent := [stage for stage in STAGES if not elements[stage]]:
        raise CheckpointError(f"there are no weights of {', '.join(absent)}")
    return Weights(nbytes, elements)


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


def _read_header(path: Path) -> Iterator[tuple[str, int]]:
    """Every tensor of a file with its number of elements."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if _LFS_POINTER.startswith(start) and len(start) == 8:
                raise CheckpointError(
                    f"{path.name} is a Git LFS pointer: fetch the files with `git lfs pull`"
                )
            (length,) = struct.unpack("<Q", start)
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path.name} is no safetensors file: its header has {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        size = path.stat().st_size
        if size < end:
            raise CheckpointError(f"{path.name} is cut short: it has {size:,} of {end:,} bytes")
        for name, tensor in header.items():
            first, last = tensor["data_offsets"]
            yield name, (last - first) // ELEMENT_BYTES.get(tensor["dtype"], 1)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} is no safetensors file: {error!r}") from error

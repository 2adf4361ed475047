"""Compact checkpoints: 16-bit weights, and repeated rows of a matrix stored once.

Ids that a small vocabulary has no use for all share one row of an embedding or a head.  A compact checkpoint
keeps that row once and says which ids have rows of their own; :func:`expand` writes the ordinary checkpoint.
The voices lie with the weights, so that nothing in the directory is a pickle.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from checkpoint.writer import complete_directory
from omnirelay.errors import CheckpointError
from shared.manifest import MANIFEST_FILE, verify_manifest, write_manifest

COMPACT_FILE = "compact.safetensors"
_FORMAT = "omnirelay-compact-1"
_WEIGHTS, _VOICES = "model.safetensors", "spk_dict.pt"
_VOICE_PREFIX = "voices."
# With fewer repetitions the description costs more than it saves.
_LEAST_SHARED = 64
_MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class SharedRow:
    """How a matrix is restored: ``rows`` in all; ``kept`` are the ids with rows of their own, in order."""

    rows: int
    kept: tuple[int, ...]

    @classmethod
    def parse(cls, entry: Any, name: str) -> "SharedRow":
        """Check a description that was read from a file."""
        if not isinstance(entry, dict) or set(entry) != {"rows", "kept"}:
            raise CheckpointError(
                f"{COMPACT_FILE}: the rows of {name} are not described by `rows` and `kept`"
            )
        rows, kept = entry["rows"], entry["kept"]
        if type(rows) is not int or not 0 < rows <= _MOST_ROWS:
            raise CheckpointError(f"{COMPACT_FILE}: {name} has {rows!r} rows; 1 to {_MOST_ROWS} are allowed")
        if not isinstance(kept, list) or not all(type(index) is int for index in kept):
            raise CheckpointError(f"{COMPACT_FILE}: the kept rows of {name} are not a list of ids")
        if kept != sorted(set(kept)) or (kept and not 0 <= kept[0] <= kept[-1] < rows):
            raise CheckpointError(
                f"{COMPACT_FILE}: the kept rows of {name} do not ascend within 0 to {rows - 1}"
            )
        return cls(rows, tuple(kept))


def compress(source: Path, target: Path) -> None:
    """Write the checkpoint ``source`` compactly to ``target``, a new or empty directory.

    Raises:
        CheckpointError: ``source`` is no checkpoint of one file, or a weight is too large for 16 bits.
    """
    if not (source / _WEIGHTS).is_file():
        raise CheckpointError(f"{source} holds no {_WEIGHTS}; name a checkpoint made by this package")
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[str, SharedRow] = {}
    for name, tensor in load_file(source / _WEIGHTS).items():
        found = _shared_row(tensor)
        if found is not None:
            description, tensor = found  # noqa: PLW2901  (what is stored in its place)
            shared[name] = description
        tensors[name] = _in_16_bits(name, tensor)
    tokens: dict[str, int] = {}
    for voice, entry in torch.load(source / _VOICES, weights_only=True).items():
        tokens[voice] = entry["bos_token"]
        for name in ("cond", "ref_mel"):
            tensors[f"{_VOICE_PREFIX}{voice}.{name}"] = entry[name].half().contiguous()
    metadata = {
        "format": _FORMAT,
        "rows": json.dumps({name: asdict(entry) for name, entry in shared.items()}),
        "voices": json.dumps(tokens),
    }
    with complete_directory(target) as partial:
        for path in source.iterdir():
            if path.name not in (_WEIGHTS, _VOICES, MANIFEST_FILE):
                shutil.copyfile(path, partial / path.name)
        save_file(tensors, partial / COMPACT_FILE, metadata)
        write_manifest(partial)


def _shared_row(tensor: torch.Tensor) -> tuple[SharedRow, torch.Tensor] | None:
    """Return how a matrix shares a row, and its own rows with the shared one last; None if it does not."""
    if tensor.dim() != 2 or len(tensor) <= _LEAST_SHARED:
        return None
    _, inverse, counts = torch.unique(tensor, dim=0, return_inverse=True, return_counts=True)
    if int(counts.max()) < _LEAST_SHARED:
        return None
    shares = inverse == counts.argmax()
    kept = (~shares).nonzero().flatten()
    rows = torch.cat([tensor[kept], tensor[shares][:1]])
    return SharedRow(len(tensor), tuple(kept.tolist())), rows


def _in_16_bits(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.contiguous()
    half = tensor.half().contiguous()
    if not bool(torch.isfinite(half).all()):
        raise CheckpointError(f"{name} holds values that 16 bits cannot; a checkpoint of this kind must not")
    return half


def expand(source: Path, target: Path) -> None:
    """Write the compact checkpoint ``source`` to ``target`` as an ordinary one, in 32 bits.

    ``target`` must be new, empty, or an earlier checkpoint of this package, which is then replaced.  It gets
    the manifest of ``source``, which says what it was made of.

    Raises:
        CheckpointError: a file is damaged, or not as :func:`compress` writes it.
    """
    verify_manifest(source)
    path = source / COMPACT_FILE
    metadata = _metadata(path)
    shared = {name: SharedRow.parse(entry, name) for name, entry in metadata["rows"].items()}
    tensors = load_file(path)
    voices: dict[str, dict[str, Any]] = {}
    for voice, token in metadata["voices"].items():
        parts = {name: tensors.pop(f"{_VOICE_PREFIX}{voice}.{name}", None) for name in ("cond", "ref_mel")}
        if None in parts.values() or type(token) is not int:
            raise CheckpointError(f"{path}: the voice {voice} is incomplete")
        voices[voice] = {**{name: part.float() for name, part in parts.items() if part is not None}}
        voices[voice]["bos_token"] = token
    missing = shared.keys() - tensors.keys()
    if missing:
        raise CheckpointError(f"{path}: {', '.join(sorted(missing))} described, but not there")
    weights = {name: _restored(name, tensor, shared.get(name)) for name, tensor in tensors.items()}
    with complete_directory(target) as partial:
        for other in source.iterdir():
            if other.name != COMPACT_FILE:
                shutil.copyfile(other, partial / other.name)
        save_file(weights, partial / _WEIGHTS, {"format": "pt"})
        torch.save(voices, partial / _VOICES)


def _metadata(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if found.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is no compact checkpoint of the format {_FORMAT}")
    result: dict[str, dict[str, Any]] = {}
    for name in ("rows", "voices"):
        try:
            entries = json.loads(found.get(name, ""))
        except json.JSONDecodeError as error:
            raise CheckpointError(f"{path}: the metadata `{name}` is no JSON: {error}") from error
        if not isinstance(entries, dict):
            raise CheckpointError(f"{path}: the metadata `{name}` is no object")
        result[name] = entries
    return result


def _restored(name: str, tensor: torch.Tensor, shared: SharedRow | None) -> torch.Tensor:
    values = tensor.float() if tensor.is_floating_point() else tensor
    if shared is None:
        return values
    if len(values) != len(shared.kept) + 1:
        raise CheckpointError(
            f"{COMPACT_FILE}: {name} holds {len(values)} rows; "
            f"{len(shared.kept)} and a shared one are described"
        )
    whole = values[-1].repeat(shared.rows, 1)
    whole[list(shared.kept)] = values[:-1]
    return whole

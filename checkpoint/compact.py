"""Compact checkpoints: 16-bit weights, and repeated rows of a matrix stored once.

Ids that a small vocabulary has no use for all share one row of an embedding or a head.  A compact checkpoint
keeps that row once and says which ids have rows of their own; :func:`expand` writes the ordinary checkpoint.
The voices lie with the weights, so that nothing in the directory is a pickle.
"""

import shutil
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from checkpoint.writer import complete_directory
from omnirelay.errors import CheckpointError, said
from shared.manifest import MANIFEST_FILE, verify_manifest, write_manifest

COMPACT_FILE = "compact.safetensors"
_FORMAT = "omnirelay-compact-1"
_WEIGHTS, _VOICES = "model.safetensors", "spk_dict.pt"
_VOICE_PREFIX = "voices."
# With fewer repetitions the description costs more than it saves.
_LEAST_SHARED = 64
_MOST_ROWS = 1 << 20


class SharedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a matrix is restored: ``rows`` in all; ``kept`` are the ids with rows of their own, in order."""

    rows: Annotated[int, Meta(gt=0, le=_MOST_ROWS)]
    kept: list[int]

    def __post_init__(self) -> None:
        """Raise ValueError at ids out of order or range; when it is decoded, msgspec says where."""
        if self.kept != sorted(set(self.kept)) or not set(self.kept) <= set(range(self.rows)):
            raise ValueError(f"the kept rows do not ascend within 0 to {self.rows - 1}")


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
        "rows": msgspec.json.encode(shared).decode(),
        "voices": msgspec.json.encode(tokens).decode(),
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
    return SharedRow(len(tensor), kept.tolist()), rows


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
    shared, tokens = _described(path)
    tensors = load_file(path)
    voices: dict[str, dict[str, Any]] = {}
    for voice, token in tokens.items():
        parts = {name: tensors.pop(f"{_VOICE_PREFIX}{voice}.{name}", None) for name in ("cond", "ref_mel")}
        if None in parts.values():
            raise CheckpointError(f"{path}: the voice {voice} is incomplete")
        floats = {name: part.float() for name, part in parts.items() if part is not None}
        voices[voice] = {**floats, "bos_token": token}
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


def _described(path: Path) -> tuple[dict[str, SharedRow], dict[str, int]]:
    """What the file says of shared rows, by tensor, and the first token of each voice."""
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if found.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is no compact checkpoint of the format {_FORMAT}")
    try:
        shared = msgspec.json.decode(found.get("rows", ""), type=dict[str, SharedRow])
        return shared, msgspec.json.decode(found.get("voices", ""), type=dict[str, int])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: its metadata is not what was written: {said(error)}") from error


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
    whole[shared.kept] = values[:-1]
    return whole

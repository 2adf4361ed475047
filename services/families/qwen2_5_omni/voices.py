"""The voices of a checkpoint, read from its ``spk_dict.pt``.

The file maps a voice's name to what the stages need of it: the talker's prompt starts with the
text token ``bos_token`` and token2wav is conditioned on ``cond`` and ``ref_mel`` (transformers:
``Qwen2_5OmniForConditionalGeneration.load_speakers``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from omnirelay.errors import CheckpointError, said
from services.families.qwen2_5_omni import SPEAKER_FILE


@dataclass(frozen=True, eq=False)
class Speaker:
    """One voice."""

    name: str
    cond: torch.Tensor  # Speaker embedding, float32 [1, enc_emb_dim]
    ref_mel: torch.Tensor  # Log-mel frames of a reference recording, float32 [1, frames, mel_dim]
    bos_token: int  # Text token id with which the talker's prompt begins


def load_speakers(path: Path) -> dict[str, Speaker]:
    """Read every voice of a speaker file, or of the checkpoint directory that holds it, in its order.

    Raises CheckpointError if there is none, or a value has the wrong shape or type.
    """
    file = path / SPEAKER_FILE if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file}: the speaker file of the checkpoint is missing")
    try:
        voices = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{file}: not a file of plain tensors: {said(error)}") from error
    if not isinstance(voices, Mapping) or not voices:
        raise CheckpointError(f"{file}: expected a dictionary with at least one voice")
    return {str(name): _speaker(file, str(name), entry) for name, entry in voices.items()}


def _speaker(file: Path, name: str, entry: object) -> Speaker:
    if not isinstance(entry, Mapping):
        raise CheckpointError(f"{file}: voice {name!r} is {type(entry).__name__}, not a dictionary")
    cond = _tensor(file, name, entry, "cond", ("1", "enc_emb_dim"))
    ref_mel = _tensor(file, name, entry, "ref_mel", ("1", "frames", "mel_dim"))
    return Speaker(name, cond, ref_mel, _token_id(file, name, entry))


def _tensor(
    file: Path, name: str, entry: Mapping[object, object], key: str, sizes: Sequence[str]
) -> torch.Tensor:
    """A tensor of floats of these sizes, the first of which is 1 and may be left out in the file."""
    value = entry.get(key)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        raise CheckpointError(f"{file}: {name}.{key} is missing or not a tensor of floats")
    value = value.to(torch.float32)
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{file}: {name}.{key} holds values that are not finite")
    if value.ndim == len(sizes) - 1:
        value = value.unsqueeze(0)
    if value.ndim != len(sizes) or value.shape[0] != 1 or 0 in value.shape:
        shape, expected = list(value.shape), ", ".join(sizes)
        raise CheckpointError(f"{file}: {name}.{key} has shape {shape}, expected [{expected}]")
    return value


def _token_id(file: Path, name: str, entry: Mapping[object, object]) -> int:
    value = entry.get("bos_token")
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{file}: {name}.bos_token is missing or not a token id")
    return value

"""Where the checkpoint is: a directory, or a copy of one from the Hugging Face hub."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from shared.config import DEFAULT_CHECKPOINT, Config
from shared.errors import CheckpointError

TOKENIZER_FILES: Final = ("*.json", "*.jinja")
"""Patterns of the files that a process without a model needs."""
WEIGHT_INDEX: Final = "model.safetensors.index.json"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(config: Config, patterns: Sequence[str] | None = None) -> Path:
    """Give the directory of the configured checkpoint.

    Args:
        config: Its ``model`` is a directory, a hub id (``Qwen/Qwen2.5-Omni-7B``), or none for the small
            checkpoint in :data:`shared.config.DEFAULT_CHECKPOINT`, relative to the working directory.
        patterns: Which files to fetch from the hub; none fetches all.

    Raises:
        CheckpointError: There is no such directory, it lacks ``config.json``, or the hub does not give it.
    """
    if config.model is None:
        return _checked(DEFAULT_CHECKPOINT, "run `omnirelay checkpoint` to make it, or set OMNI_MODEL")
    directory = Path(config.model).expanduser()
    if directory.exists() or not _HUB_ID.fullmatch(config.model):
        return _checked(directory, "OMNI_MODEL is neither a checkpoint's directory nor a hub id")
    return _download(config.model, patterns)


def require_model_files(directory: Path) -> None:
    """Check, before minutes are spent on loading, that a checkpoint has the files that a stage reads.

    Raises:
        CheckpointError: Naming every file that is missing.
    """
    missing = [name for name in ("config.json", "spk_dict.pt") if not (directory / name).is_file()]
    index = directory / WEIGHT_INDEX
    if index.is_file():
        missing += [name for name in _shards(index) if not (directory / name).is_file()]
    elif not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise CheckpointError(f"the checkpoint in {directory} lacks {', '.join(missing)}")


def _shards(index: Path) -> list[str]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error!r}") from error
    return sorted(str(name) for name in names)


def _checked(directory: Path, advice: str) -> Path:
    if not directory.is_dir():
        raise CheckpointError(f"no checkpoint in {directory}: there is no such directory; {advice}")
    if not (directory / "config.json").is_file():
        raise CheckpointError(f"no checkpoint in {directory}: it lacks config.json; {advice}")
    return directory


def _download(hub_id: str, patterns: Sequence[str] | None) -> Path:
    # Imported here because it takes longer than all other imports of the gateway together.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    try:
        path = snapshot_download(hub_id, allow_patterns=list(patterns) if patterns else None)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"cannot get {hub_id} from the Hugging Face hub: {error}") from error
    return _checked(Path(path), "the hub's repository is not a checkpoint")

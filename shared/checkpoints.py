"""Locates the checkpoint: a directory, or a download from the Hugging Face hub."""

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointAccessError, CheckpointError
from shared.config import DEFAULT_CHECKPOINT, Config

TOKENIZER_FILES: Final = ("*.json", "*.jinja", "merges.txt")
"""Files that a process without a model needs."""
WEIGHT_INDEX: Final = "model.safetensors.index.json"
log = logging.getLogger(__name__)
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(config: Config, patterns: Sequence[str] | None = None) -> Path:
    """The directory of the configured checkpoint, downloaded if necessary.

    Of a hub id (``Qwen/Qwen2.5-Omni-7B``) only the files that match ``patterns`` are downloaded.

    Raises:
        CheckpointError: The directory or its ``config.json`` is missing, or the download failed.
    """
    if config.model is None:
        advice = f"run `omnirelay checkpoint --size speaking {DEFAULT_CHECKPOINT}`, or set OMNI_MODEL"
        return _checked(DEFAULT_CHECKPOINT, advice)
    directory = Path(config.model).expanduser()
    with _reachable(directory):
        there = directory.exists()
    if there or not is_hub_id(config.model):
        return _checked(directory, "OMNI_MODEL is neither a checkpoint's directory nor a hub id")
    return _download(config.model, config.revision, patterns)


def find_model(config: Config) -> Path | None:
    """The directory of the configured checkpoint if it is on this machine, perhaps without some files.

    Raises:
        CheckpointAccessError: This user may not see whether there is one.
    """
    if config.model is None:
        return DEFAULT_CHECKPOINT if DEFAULT_CHECKPOINT.is_dir() else None
    directory = Path(config.model).expanduser()
    with _reachable(directory):
        if directory.exists() or not is_hub_id(config.model):
            return directory if directory.is_dir() else None
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - see below

    try:
        return Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))
    except (OSError, ValueError) as error:
        log.debug("no copy of %s: %s", config.model, error)
        return None


def served_name(config: Config) -> str:
    """The configured checkpoint's name for clients: its hub id, or the name of its directory."""
    if config.model is None:
        return DEFAULT_CHECKPOINT.name
    directory = Path(config.model).expanduser()
    return directory.resolve().name if directory.exists() else config.model


def is_hub_id(model: str) -> bool:
    """Whether it has the form of a hub id."""
    return _HUB_ID.fullmatch(model) is not None


def require_readable(directory: Path, patterns: Sequence[str]) -> None:
    """Raise :class:`CheckpointAccessError`, naming every file that exists and that this user may not read."""
    closed = []
    try:
        for path in sorted({path for pattern in patterns for path in directory.glob(pattern)}):
            try:
                path.open("rb").close()
            except FileNotFoundError:
                # A link to a file that is not downloaded yet.
                continue
            except PermissionError:
                closed.append(path.name)
        os.scandir(directory).close()
    except PermissionError:
        closed = ["the directory itself"]
    if closed:
        raise _closed(directory, ", ".join(closed))


def _closed(place: Path, what: str) -> CheckpointAccessError:
    return CheckpointAccessError(
        f"user {os.geteuid()} may not read {what} in {place}: run `chmod -R a+rX {place}`"
    )


def read_config(directory: Path) -> dict[str, Any]:
    """Read a checkpoint's ``config.json``; raises CheckpointError if it cannot be read."""
    return read_object(directory / "config.json")


def read_object(path: Path) -> dict[str, Any]:
    """Read a file of a checkpoint that holds a JSON object; raises CheckpointError if it cannot be read."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} cannot be read: it holds no object")
    return values


def weight_files(directory: Path) -> list[Path]:
    """The files of a checkpoint's weights, whether they exist or not; raises as :func:`weight_map`."""
    index = directory / WEIGHT_INDEX
    if not index.is_file():
        return sorted(directory.glob("*.safetensors")) or [directory / "*.safetensors"]
    return [directory / name for name in sorted(set(weight_map(index).values()))]


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, from an index of weights.

    Raises:
        CheckpointError: It cannot be read, or names a file elsewhere.
    """
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if outside := [file for file in files.values() if Path(file).name != file]:
            raise ValueError(f"{outside[0]!r} is no file beside it")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error!r}") from error
    return files


def _checked(directory: Path, advice: str) -> Path:
    with _reachable(directory):
        if not directory.is_dir():
            raise CheckpointError(f"no checkpoint in {directory}: there is no such directory; {advice}")
        require_readable(directory, TOKENIZER_FILES)
        if not (directory / "config.json").is_file():
            raise CheckpointError(f"no checkpoint in {directory}: it lacks config.json; {advice}")
    return directory


@contextmanager
def _reachable(directory: Path) -> Iterator[None]:
    """Report a directory that this user may not look at."""
    try:
        yield
    except PermissionError as error:
        raise _closed(directory.parent, directory.name) from error


def _download(hub_id: str, revision: str | None, patterns: Sequence[str] | None) -> Path:
    # Imported here because it takes longer than the gateway's other imports together.
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError  # noqa: PLC0415

    try:
        wanted = list(patterns) if patterns else None
        path = snapshot_download(hub_id, revision=revision, allow_patterns=wanted)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"cannot download {hub_id} from the Hugging Face hub: {error}") from error
    return _checked(Path(path), "the hub's repository is not a checkpoint")

"""The families that are served."""

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from omnirelay.errors import CheckpointError
from services.families.family import Families, Family
from services.families.qwen2_5_omni import QWEN2_5_OMNI
from services.families.qwen3_omni import QWEN3_OMNI
from shared.families import known
from shared.model_files import require_model_files

FAMILIES: Final[Families] = MappingProxyType({each.model_type: each for each in (QWEN2_5_OMNI, QWEN3_OMNI)})
"""By the ``model_type`` of a checkpoint's ``config.json``: a new family is entered here."""


def read_config(directory: Path) -> dict[str, Any]:
    """Read a checkpoint's ``config.json``; raises CheckpointError if it cannot be read."""
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path.name} cannot be read: it holds no object")
    return values


def family_of(config: dict[str, Any], families: Families = FAMILIES) -> Family:
    """Find a checkpoint's family by its ``config.json``; raises CheckpointError if none is known."""
    return known.family_of(config, families)


def require_family(directory: Path, families: Families = FAMILIES) -> Family:
    """Find a checkpoint's family; raises CheckpointError also if a file is missing or damaged."""
    try:
        family = family_of(read_config(directory), families)
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint in {directory}: {error}") from None
    require_model_files(directory, family.files, family.check_files)
    return family

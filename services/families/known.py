"""The families that are served."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from omnirelay.errors import CheckpointError
from services.families.family import Family
from services.families.qwen2_5_omni import QWEN2_5_OMNI
from services.families.qwen3_omni import QWEN3_OMNI
from shared import families as known
from shared.checkpoints import read_config
from shared.model_files import require_model_files

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {each.model_type: each for each in (QWEN2_5_OMNI, QWEN3_OMNI)}
)
"""By the ``model_type`` of a checkpoint's ``config.json``: a new family is entered here."""


def family_of(config: dict[str, Any]) -> Family:
    """Find a checkpoint's family by its ``config.json``; raises CheckpointError if none is known."""
    return known.family_of(config, FAMILIES)


def require_family(directory: Path) -> Family:
    """Find a checkpoint's family; raises CheckpointError also if a file is missing or damaged."""
    try:
        family = family_of(read_config(directory))
    except CheckpointError as error:
        raise CheckpointError(f"the checkpoint in {directory}: {error}") from None
    require_model_files(directory, family.files, family.check_files)
    return family

"""The families that gateways know."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

from omnirelay.errors import CheckpointError
from shared.families.description import Description
from shared.families.qwen2_5_omni import QWEN2_5_OMNI
from shared.families.qwen3_omni import QWEN3_OMNI

F = TypeVar("F")
Descriptions = Mapping[str, Description]
"""Families by their ``model_type``."""
DESCRIPTIONS: Final[Descriptions] = MappingProxyType(
    {each.model_type: each for each in (QWEN2_5_OMNI, QWEN3_OMNI)}
)


def family_of(config: Mapping[str, Any], families: Mapping[str, F]) -> F:
    """Find a checkpoint's family by its ``config.json``; raises CheckpointError if none is known."""
    kind = config.get("model_type")
    family = families.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(map(repr, families))
        raise CheckpointError(f"config.json is of a model of type {kind!r}; known: {known}")
    return family

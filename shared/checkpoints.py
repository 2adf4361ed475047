"""Finds the checkpoint that the configuration names."""

from pathlib import Path

from shared.config import DEFAULT_CHECKPOINT, Config


def resolve_model(config: Config) -> Path:
    return Path(config.model or DEFAULT_CHECKPOINT)

"""Addresses of processes beside the first of their kind, and how a process gets its own."""

from collections.abc import Mapping
from typing import Final

from shared.config import ENV_PREFIX, Config
from shared.messages import StageName

HTTP_PORTS_APART: Final = 10
"""Distance of a replica's HTTP port from the one before."""


def variables(section: str, values: Mapping[str, str | None]) -> dict[str, str]:
    """Environment variables that set keys of a section of the configuration; None is ``null``."""
    prefix = f"{ENV_PREFIX}{section.replace('.', '__').upper()}__"
    return {f"{prefix}{key.upper()}": value or "null" for key, value in values.items()}


def own_addresses(config: Config, name: StageName, number: int) -> dict[str, str | None]:
    """Return ``inbox`` and ``http`` of a further replica; ``number`` counts from 2."""
    stage = config.stage(name)
    if stage.inbox.startswith("ipc://"):
        inbox = f"{stage.inbox}.{number}"
    else:
        inbox = f"{stage.inbox.rpartition(':')[0]}:*"
    http = None
    if stage.http is not None:
        host, _, port = stage.http.rpartition(":")
        http = f"{host}:{int(port) + HTTP_PORTS_APART * (number - 1)}"
    return {"inbox": inbox, "http": http}

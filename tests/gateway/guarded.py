"""Gateways that ask for API keys, and the keys of two clients."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import yaml

from gateway.access.api_keys import hash_of
from tests.gateway.bench import Bench

KEY: Final = "omr_alices-own-key"
OTHER: Final = "omr_bobs-own-key"
BEARER: Final = {"Authorization": f"Bearer {KEY}"}
CHAT: Final = "/v1/chat/completions"


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def keys_file(path: Path, **keys: dict[str, object]) -> Path:
    """A file of keys: what each may do, and under ``key`` the key itself."""
    entries = {name: {"sha256": hash_of(str(entry.pop("key"))), **entry} for name, entry in keys.items()}
    return written(path, yaml.safe_dump(entries))


@asynccontextmanager
async def serving(b: Bench) -> AsyncIterator[None]:
    """Every request is answered with a greeting."""
    b.stages.serve(b.encode("Hello"))
    yield

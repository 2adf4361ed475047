"""``SHA256SUMS``: which files a directory holds, with their digests, as ``sha256sum --check`` reads it."""

import hashlib
import re
from pathlib import Path
from typing import Final

from omnirelay.errors import CheckpointError

MANIFEST_FILE: Final = "SHA256SUMS"
_LARGEST: Final = 2**16
_LINE: Final = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_][\w.-]*)")


def write_manifest(directory: Path) -> None:
    """Write the digests of all files of a directory into it."""
    paths = sorted(path for path in directory.iterdir() if path.name != MANIFEST_FILE)
    lines = [f"{_digest(path)}  {path.name}\n" for path in paths]
    (directory / MANIFEST_FILE).write_text("".join(lines), encoding="utf-8")


def read_manifest(directory: Path) -> bytes | None:
    """Return the manifest of a directory; none if it has none.

    Two directories with equal manifests were made of equal files.
    """
    try:
        with (directory / MANIFEST_FILE).open("rb") as file:
            return file.read(_LARGEST)
    except FileNotFoundError:
        return None


def verify_manifest(directory: Path) -> None:
    """Raise :class:`CheckpointError` without a manifest, or if a file is missing, damaged, or not listed."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise CheckpointError(f"{directory} holds no {MANIFEST_FILE}")
    wanted: dict[str, str] = {}
    for line in manifest.decode("utf-8", errors="replace").splitlines():
        found = _LINE.fullmatch(line)
        if found is None:
            raise CheckpointError(
                f"{directory / MANIFEST_FILE}: {line[:100]!r} is not a digest and a file name"
            )
        wanted[found[2]] = found[1]
    present = {path.name for path in directory.iterdir()} - {MANIFEST_FILE}
    if present != wanted.keys():
        different = ", ".join(sorted(present ^ wanted.keys()))
        raise CheckpointError(f"{directory}: {MANIFEST_FILE} and the files differ in {different}")
    for name, digest in wanted.items():
        if _digest(directory / name) != digest:
            raise CheckpointError(
                f"{directory / name} is damaged: its SHA-256 is not that in {MANIFEST_FILE}"
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

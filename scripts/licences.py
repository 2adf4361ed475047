#!/usr/bin/env python3
"""Write the table of ``docs/licences.md``: the licence of every locked package, from its metadata.

    .venv/bin/python scripts/licences.py

``tests/unit/test_requirements.py`` compares the page with this, so each new package or licence gets a review.
"""

from __future__ import annotations

from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Final, cast

from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "licences.md"
LOCKS: Final = {
    "gateway": "gateway.lock",
    "calls": "webrtc.lock",
    "stages": "cpu.lock",
    "torch": "torch.lock",
    "development": "dev.lock",
    "cluster": "cluster.lock",
}
LONGEST: Final = 100
"""Longest name of a licence; longer values are its text."""
NOT_IN_METADATA: Final = {
    "atheris": "Apache-2.0",
    "espeakng-loader": "MIT",
    "oss-harmony": "Apache-2.0",
    # Of an extra that is not in the environment.
    "msgpack": "Apache-2.0",
    "ray": "Apache-2.0",
    "setuptools": "MIT",
    "cycler": "BSD-3-Clause",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "Matplotlib (based on PSF)",
    "numpy": "BSD-3-Clause",
}
"""Licences known from the package's licence file only."""
TABLE: Final = "## All packages\n\n| package | licence | in |\n|---|---|---|\n"
"""Start of the generated part of the page."""


def locked() -> dict[str, list[str]]:
    """Map each locked package to its sets."""
    found: dict[str, list[str]] = {}
    for where, lock in LOCKS.items():
        for line in (ROOT / "requirements" / lock).read_text(encoding="utf-8").splitlines():
            name, pinned, _ = line.partition("==")
            if pinned and name[0] not in "# ":
                sets = found.setdefault(canonicalize_name(name), [])
                sets.append("stages" if where == "torch" else where)
    return dict(sorted(found.items()))


def licence(name: str) -> str:
    """Return the licence of an installed package.

    Raises:
        LookupError: Neither its metadata nor :data:`NOT_IN_METADATA` names one.
    """
    if name in NOT_IN_METADATA:
        return NOT_IN_METADATA[name]
    told = cast(Message, metadata.metadata(name))
    if expression := told.get("License-Expression"):
        return str(expression)
    short = (told.get("License") or "").strip()
    if short and len(short) <= LONGEST and "\n" not in short:
        return short
    classifiers = [each for each in told.get_all("Classifier") or [] if each.startswith("License ::")]
    if classifiers:
        return "; ".join(each.rpartition(" :: ")[2] for each in classifiers)
    first = short.partition("\n")[0].strip()
    if first.endswith("License"):
        return first
    raise LookupError(
        f"{name} names no licence in its metadata: look at its files, and add it to NOT_IN_METADATA"
    )


def page() -> str:
    """Return the page with its table regenerated."""
    written = PAGE.read_text(encoding="utf-8").partition(TABLE)[0]
    rows = [f"| `{name}` | {licence(name)} | {', '.join(sets)} |" for name, sets in locked().items()]
    return written + TABLE + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

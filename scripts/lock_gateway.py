#!/usr/bin/env python3
"""Derive ``requirements/gateway.lock`` and ``webrtc.lock`` from ``cpu.lock`` and ``dev.lock`` beside them.

    .venv/bin/python scripts/lock_gateway.py

The gateway's lock holds the ``dependencies`` of both projects, server and client, and what those need in turn
(from the metadata of the installed packages), each with its lines of cpu.lock: versions are chosen
there alone.  ``webrtc.lock`` holds what the extra ``webrtc`` needs beside it.
``tests/unit/test_requirements.py`` holds the files to what this gives.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "deploy" / "client" / "pyproject.toml"
CPU_LOCK = ROOT / "requirements" / "cpu.lock"
DEV_LOCK = ROOT / "requirements" / "dev.lock"
WEBRTC_LOCK = ROOT / "requirements" / "webrtc.lock"
GATEWAY_LOCK = ROOT / "requirements" / "gateway.lock"
HEADER = """\
# Every package of the gateway's image, pinned: what OmniRelay needs where no stage runs, without PyTorch.
# Derived from cpu.lock by scripts/lock_gateway.py; not edited by hand.  Installed with `--no-deps`, and
# only from the files whose hashes are here.
"""
WEBRTC_HEADER = """\
# Every package that the gateway needs for calls by WebRTC, beside gateway.lock, pinned.
# Derived from cpu.lock and dev.lock by scripts/lock_gateway.py; not edited by hand.  Installed with
# `--no-deps`, and only from the files whose hashes are here.
"""


def closure(requirements: Iterable[str]) -> set[str]:
    """Give the canonical names of the required packages and of all that they need on this platform.

    Raises:
        importlib.metadata.PackageNotFoundError: One of them is not installed here.
    """
    waiting = [Requirement(each) for each in requirements]
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        package = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if package in done:
            continue
        done.add(package)
        for text in metadata.requires(package[0]) or []:
            needed = Requirement(text)
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in (*package[1], "")
            ):
                waiting.append(needed)
    return {name for name, _ in done}


def derive() -> str:
    """Give what gateway.lock must hold.

    Raises:
        ValueError: A package is needed that cpu.lock does not pin.
    """
    files = (ROOT / "pyproject.toml", CLIENT)
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    needs = [need for project in projects for need in project["dependencies"]]
    # The projects themselves come from the repository.
    own = {project["name"] for project in projects}
    names = closure(need for need in needs if Requirement(need).name not in own)
    return HEADER + _entries(names, CPU_LOCK)


def derive_webrtc() -> str:
    """Give what webrtc.lock must hold; raises as :func:`derive`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = closure(project["optional-dependencies"]["webrtc"])
    names -= {line.partition("==")[0] for line in derive().splitlines()}
    return WEBRTC_HEADER + _entries(names, CPU_LOCK, DEV_LOCK)


def _entries(names: set[str], *locks: Path) -> str:
    """Give the lines of these packages: a pin each, with its hashes."""
    text = "\n".join(lock.read_text(encoding="utf-8") for lock in locks)
    entries = re.findall(r"^[a-z0-9].*(?:\n .*)*", text, re.MULTILINE)
    pins: dict[str, str] = {canonicalize_name(each.split("==")[0]): each for each in entries}
    if missing := names - pins.keys():
        raise ValueError(f"the locks do not pin {', '.join(sorted(missing))}")
    return "".join(f"{pins[name]}\n" for name in sorted(names))


if __name__ == "__main__":
    for lock, text in ((GATEWAY_LOCK, derive()), (WEBRTC_LOCK, derive_webrtc())):
        lock.write_text(text, encoding="utf-8")
        print(f"{lock.relative_to(ROOT)} is written")

#!/usr/bin/env python3
"""Write the SHA-256 of each package into the lock files, so that pip installs these very files.

    .venv/bin/python scripts/lock_hashes.py && .venv/bin/python scripts/lock_gateway.py

Run it after changing a version in ``requirements/*.lock``; it takes minutes.  pip reports the file it would
install for each pin, on old and new Linux, x86-64 and ARM.  ``requirements/torch.lock`` has no hashes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
SETS = (("cpu.lock", "dev.lock", "cluster.lock"), ("audit.lock",))
"""Locks that are installed together; versions may differ between these sets."""
SDISTS = ("docopt",)
"""Packages that have no wheel, whose sdists may be built; any other sdist is refused."""
MACHINES = ("x86_64", "aarch64")
GLIBC = (31, 39)
"""Minor versions: the oldest that every package supports (llguidance's bound), and a new one."""
FIRST_GLIBC = 5
"""Minor version of the oldest wheels."""
OLD_NAMES = {
    "x86_64": ("manylinux2014", "manylinux2010", "manylinux1", "linux"),
    "aarch64": ("manylinux2014", "linux"),
}


def pins_of(lock: Path) -> list[Requirement]:
    """Return the pins of a lock file, without hashes."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return [Requirement(line.removesuffix("\\")) for line in lines if line and line[0] not in "# "]


def wheels_alone() -> list[str]:
    """Return pip's options that refuse sdists but :data:`SDISTS`."""
    return ["--only-binary", ":all:", "--no-binary", ",".join(SDISTS)]


def ask_pip(pins: Iterable[Requirement], machine: str, glibc: int) -> dict[str, str]:
    """Return the SHA-256 of the file that pip would install for each pin, by canonical name."""
    wanted = {
        f"{pin.name}{pin.specifier}"
        for pin in pins
        if pin.marker is None or pin.marker.evaluate({"platform_machine": machine})
    }
    names = [f"manylinux_2_{minor}" for minor in range(glibc, FIRST_GLIBC - 1, -1)] + [*OLD_NAMES[machine]]
    with tempfile.TemporaryDirectory() as folder:
        asked, report = Path(folder, "pins"), Path(folder, "report")
        asked.write_text("\n".join(sorted(wanted)), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += [
            "--no-deps",
            *wheels_alone(),
            "--implementation",
            "cp",
            "--python-version",
            "3.11",
        ]
        command += [part for name in names for part in ("--platform", f"{name}_{machine}")]
        command += ["--target", folder, "--report", str(report), "-r", str(asked)]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {
        canonicalize_name(each["metadata"]["name"]): each["download_info"]["archive_info"]["hashes"]["sha256"]
        for each in installs
    }


def with_hashes(text: str, hashes: dict[str, set[str]]) -> str:
    """Return the text of a lock file with these hashes behind its pins."""
    lines = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        pin = line.removesuffix("\\").rstrip()
        found = set() if line.startswith("#") else hashes.get(pin.partition("==")[0], set())
        lines.append(" \\\n".join([pin, *(f"    --hash=sha256:{each}" for each in sorted(found))]))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write them."""
    for names in SETS:
        write([REQUIREMENTS / name for name in names])


def write(locks: Sequence[Path], machines: Sequence[str] = MACHINES) -> None:
    """Write the hashes into locks that are installed together."""
    pins = [pin for lock in locks for pin in pins_of(lock)]
    hashes: defaultdict[str, set[str]] = defaultdict(set)
    for machine in machines:
        for glibc in GLIBC:
            print(f"{len(pins)} packages on {machine} with glibc 2.{glibc}", flush=True)
            for name, each in ask_pip(pins, machine, glibc).items():
                hashes[name].add(each)
    for lock in locks:
        lock.write_text(with_hashes(lock.read_text(encoding="utf-8"), hashes), encoding="utf-8")
        print(f"{lock.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What the locked packages are, and what is known against them: ``make sbom`` and ``make audit``.

    .venv-audit/bin/python scripts/supply_chain.py sbom [--out FOLDER]
    .venv-audit/bin/python scripts/supply_chain.py audit [--service pypi|osv]

``sbom`` needs no network.  ``audit`` asks an advisory service about every pin; it fails if anything is known
against one, and also if the service cannot be asked about all of them: silence is no good news.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
SETS = {
    "gateway": ["gateway.lock"],
    "gateway-calls": ["gateway.lock", "webrtc.lock"],
    "stages-cpu": ["torch.lock", "cpu.lock"],
    "development": ["torch.lock", "cpu.lock", "dev.lock"],
}
"""What is installed together, from which locks."""
ENVIRONMENTS = {"environment-cpu": ".venv", "environment-gpu": ".venv-gpu"}
"""What was installed, with all that it needed: the GPU set is resolved by pip, and not locked."""
AUDITED = [*SETS["development"], "gpu.txt", "quality.lock", "cluster.lock"], ["audit.lock"]
"""What is asked about together: one version of each package."""
FOUND, UNKNOWN = 1, 2
"""Exit statuses: something is known against a package; nobody could be asked."""


def sbom(out: Path) -> int:
    """Write a CycloneDX file for each set of locked packages, and for each environment that is there."""
    out.mkdir(parents=True, exist_ok=True)
    for name, folder in ENVIRONMENTS.items():
        python = ROOT / folder / "bin" / "python"
        if python.exists():
            describe(out / f"sbom-{name}.json", "environment", str(python))
    for name, locks in SETS.items():
        text = "".join((REQUIREMENTS / lock).read_text(encoding="utf-8") for lock in locks)
        path = out / f"sbom-{name}.json"
        with tempfile.TemporaryDirectory() as folder:
            pins = Path(folder, "requirements.txt")
            pins.write_text(text, encoding="utf-8")
            describe(path, "requirements", str(pins))
    return 0


def describe(path: Path, *what: str) -> None:
    """Let CycloneDX write a file, and say how many packages are in it."""
    command = [sys.executable, "-W", "ignore", "-m", "cyclonedx_py", *what]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "-o", str(path)]
    subprocess.run(command, check=True)
    components = json.loads(path.read_text(encoding="utf-8"))["components"]
    print(f"{path}: {len(components)} packages")


def audit(service: str) -> int:
    """Ask the advisory service, and say what it knows."""
    packages: list[dict[str, Any]] = []
    for locks in AUDITED:
        text = "".join((REQUIREMENTS / lock).read_text(encoding="utf-8") for lock in locks)
        # Without hashes, which pip-audit wants of all or of none.
        pins = {line.removesuffix("\\").strip() for line in text.splitlines() if line and line[0] not in "# "}
        try:
            packages += ask(service, sorted(pins))
        except ServiceError as error:
            print(f"the advisory service {service!r} could not be asked: {error}")
            return UNKNOWN
    return report(service, packages)


class ServiceError(Exception):
    """Nobody could be asked; the message says why."""


def ask(service: str, pins: Sequence[str]) -> list[dict[str, Any]]:
    """Give what pip-audit hears of the service about each pin.

    Raises:
        ServiceError: Nothing.
    """
    command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", service, "--format", "json"]
    command += ["--disable-pip", "--no-deps", "--progress-spinner", "off"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "requirements.txt")
        path.write_text("\n".join(pins), encoding="utf-8")
        asked = subprocess.run([*command, "-r", str(path)], capture_output=True, text=True, check=False)
    try:
        packages: list[dict[str, Any]] = json.loads(asked.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError) as error:
        raise ServiceError((asked.stderr.strip().splitlines() or ["it said nothing"])[-1]) from error
    return packages


def report(service: str, packages: list[dict[str, Any]]) -> int:
    """Say what the service answered about each package.

    Args:
        service: Its name.
        packages: As pip-audit gives them: with ``vulns``, or with ``skip_reason``.

    Returns:
        The exit status.
    """
    known = [each for each in packages if each.get("vulns")]
    for each in known:
        for what in each["vulns"]:
            fixed = ", ".join(what["fix_versions"]) or "no version"
            print(f"{each['name']} {each['version']}: {what['id']}, mended in {fixed}")
    silent = sorted({each["name"] for each in packages if "skip_reason" in each})
    if silent:
        shown = ", ".join(silent[:5]) + (", …" if len(silent) > 5 else "")
        number = f"{len(silent)} of {len({each['name'] for each in packages})} packages ({shown})"
        advice = "run this where it can be reached itself, a mirror of the index does not do"
        print(f"the advisory service {service!r} could not be asked about {number}: {advice}")
    if known:
        return FOUND
    if silent or not packages:
        return UNKNOWN
    print(f"nothing is known against {len(packages)} packages")
    return 0


def main() -> int:
    """Do what is asked."""
    parser = argparse.ArgumentParser(description="SBOM and audit of the locked packages.")
    parser.add_argument("what", choices=["sbom", "audit"])
    parser.add_argument("--out", type=Path, default=ROOT / "out", metavar="FOLDER")
    parser.add_argument("--service", choices=["pypi", "osv"], default="pypi")
    arguments = parser.parse_args()
    return sbom(arguments.out) if arguments.what == "sbom" else audit(arguments.service)


if __name__ == "__main__":
    sys.exit(main())

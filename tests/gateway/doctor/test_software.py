"""The doctor on software, in wrong versions that are really made, and on GPUs that are not here."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from omnirelay.errors import StageStartError
from ops.doctor import gpus, software
from ops.doctor.finding import Finding
from services.families.family import Paged
from services.families.memory import Model
from services.families.qwen2_5_omni import QWEN2_5_OMNI
from shared.config import Config
from shared.devices import EngineReport, Gpu
from shared.messages import STAGES
from shared.model_files import Weights
from tests.gateway.bench import Patch
from tests.gateway.checkpoint_dir import levels, only
from tests.support.children import ROOT

GIB = 2**30
BIG = Gpu(name="Big", total_bytes=80 * GIB)
SMALL = Gpu(name="Small", total_bytes=8 * GIB)
MODEL = Model(
    dtype="bfloat16",
    weights=Weights(22 * GIB, {"thinker": 9 * GIB, "talker": 1 * GIB, "token2wav": GIB // 2}),
    paged={"thinker": Paged(32_768, 32_256), "talker": Paged(32_768, 28_160)},
    synthesis=QWEN2_5_OMNI.synthesis,
)


def look(
    gpus_there: list[Gpu], platform: str = "cuda", model: Model | None = MODEL, **stages: Any
) -> list[Finding]:
    report = EngineReport(torch="2.13.0", cuda="13.0", vllm="0.32.0", platform=platform, gpus=gpus_there)
    return list(gpus.check_devices(Config.model_validate({"stages": stages}), model, report))


def apart() -> dict[str, Any]:
    return {name: {"devices": index} for index, name in enumerate(STAGES)}


def each(values: Any) -> dict[str, Any]:
    return dict.fromkeys(STAGES, values)


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: Patch) -> None:
    """All GPUs are visible, and CUDA's compiler is there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))


def test_what_compiles_kernels_is_looked_for(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "bin/nvcc").unlink()
    nvcc, shared = look([BIG])
    assert shared.level == "ok"
    only([nvcc], "ok", "no nvcc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    only(look([BIG])[:1], "problem", f"lacks a C compiler (gcc) and Python.h ({tmp_path})")


@pytest.mark.parametrize(("library", "named"), [(("glibc", "2.28"), "glibc 2.28"), (("", ""), "unknown")])
def test_a_c_library_too_old_is_named(library: tuple[str, str], named: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: library)
    only(look([BIG])[:1], "problem", named, "2.34")
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.34"))
    assert set(levels(look([BIG]))) == {"ok"}


@pytest.mark.parametrize(("driver", "problems"), [("12.9", 2), ("13.0", 1), (None, 1)])
def test_a_driver_that_is_too_old_is_named(driver: str | None, problems: int) -> None:
    """vLLM finds no device then."""
    report = EngineReport(torch="2.13.0", cuda="13.0", vllm="0.32.0", platform="", driver=driver)
    findings = list(gpus.check_devices(Config(), MODEL, report))
    assert levels(findings) == ["problem"] * problems
    assert ("580" in str(findings[0].advice)) == (problems == 2)


def test_a_gpu_for_each_stage() -> None:
    findings = look([BIG, BIG, BIG], **apart())
    assert levels(findings) == ["ok"] * 3
    assert findings[0].what == "GPU 0, Big, 80.0 GiB: the thinker asks for 85% of it"
    # GPUs by other names are believed.
    assert look([BIG], **each({"devices": "GPU-8f6c"})) == []


def test_stages_divide_one_gpu(tmp_path: Path) -> None:
    only(look([BIG]), "ok", "is shared", "thinker", "for the KV cache", "in turns")
    (tmp_path / "control").touch()
    only(look([BIG]), "ok", "at once")
    only(look([SMALL]), "problem", "Small has 8.0 GiB", "devices")
    only(look([BIG], model=None), "warning")
    for ratio, level in ((0.25, "ok"), (0.4, "problem")):
        only(look([BIG], **each({"engine": {"gpu_memory_utilization": ratio}})), level)


def test_a_gpu_that_is_not_there(monkeypatch: Patch) -> None:
    findings = look([BIG, BIG], **apart())
    assert levels(findings) == ["problem", "ok", "ok"]
    only(findings[:1], "problem", "the token2wav is given GPU 2; there are 2, counted from 0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert levels(look([BIG])) == ["problem"] * 3


def test_fewer_gpus_than_the_stage_computes_on() -> None:
    stages = apart() | {"thinker": {"devices": "0", "engine": {"tensor_parallel_size": 2}}}
    only(look([BIG, BIG, BIG], **stages)[:1], "problem", "computes on 2 GPUs and is given 1")


def test_a_stage_that_does_not_fit_its_share() -> None:
    found = only(look([SMALL, BIG, BIG], **apart())[:1], "problem")
    assert found.what == "the thinker needs about 20.0 GiB on Small, its share is 6.8 GiB"
    parallel = {"devices": "0,1,2,3", "engine": {"tensor_parallel_size": 4}}
    others = {"devices": "4", "engine": {"gpu_memory_utilization": 0.4}}
    fits = look([SMALL] * 4 + [BIG], thinker=parallel, talker=others, token2wav=others)
    assert levels(fits) == ["ok"] * 5
    assert "is shared" in fits[4].what
    assert set(levels(look([SMALL] * 3, model=None, **apart()))) == {"ok"}


@pytest.mark.parametrize("platform", ["xpu", ""])
def test_platforms_without_stages(platform: str) -> None:
    only(look([], platform=platform), "problem", "no stage starts")


def test_machines_whose_gpus_are_not_used() -> None:
    assert "make env DEVICE=gpu" in only(look([BIG], platform="cpu"), "warning").advice
    only(look([], platform="cpu", talker={"devices": 0}), "problem", "talker")
    only(look([], platform="cpu"), "ok")


CPU = EngineReport(torch="2.13.0+cpu", cuda=None, vllm="0.32.0", platform="cpu")


def install(site: Path, name: str, version: str, *fields: str) -> None:
    """Put a package's metadata where Python looks first."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *fields]
    (info / "METADATA").write_text("\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_this_environment_is_as_the_project_wants_it() -> None:
    only(software.check_python(">=3.11,<3.14"), "ok")
    only(
        software.check_packages(["pyzmq>=26.0", "msgspec>=0.19", 'vllm<0.33,>=0.32; extra == "stages"']), "ok"
    )
    only(software.check_engine(CPU), "ok", "vLLM 0.32.0 and PyTorch 2.13.0+cpu (a CPU build)")


def test_a_python_that_does_not_fit(site: Path) -> None:
    install(site, "omnirelay-server", "9.9", "Requires-Python: >=3.99")
    only(software.check_python(software.requires_python()), "problem", "needed is >=3.99")


def test_a_project_that_is_not_installed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(software, "PROJECT", "omnirelay-is-not-here")
    assert software.project_needs() == []
    only(software.check_python(software.requires_python()), "warning")


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


def test_a_machine_for_the_gateway_only(monkeypatch: Patch) -> None:
    monkeypatch.setattr(software, "ENGINE", ("no-torch", "no-vllm"))
    needs = ["msgspec", *(f'{name}; extra == "stages"' for name in ("no-torch", "no-vllm", "no-codec"))]
    finding, rest = software.check_packages(needs)
    assert rest.level == "ok"
    only([finding], "warning", "only a gateway can run")
    assert list(software.check_engine(None)) == []


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ImportError('libcudart: not found')", "status 1: ImportError: libcudart: not found"),
        ("import os; os.abort()", "loading vLLM ended with status -6"),
        ("import sys; sys.exit(0)", "printed nothing that can be read"),
        ("print('{}'); import sys; sys.exit(0)", "printed nothing that can be read"),
        ("import time; time.sleep(60)", "took more than 1 s"),
    ],
)
def test_libraries_that_cannot_be_loaded(tmp_path: Path, monkeypatch: Patch, code: str, told: str) -> None:
    (tmp_path / "torch").mkdir()
    # It is run when a process of ours loads PyTorch.
    (tmp_path / "torch" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StageStartError, match=told) as raised:
        software.load_engine(1.0 if "sleep" in code else 30.0)
    only(software.check_engine(raised.value), "problem")


def test_no_process_is_no_reason_to_stop(monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(StageStartError, match="No such file"):
        software.load_engine()


def test_a_turn_model_that_cannot_be_loaded(monkeypatch: Patch) -> None:
    assert not [*software.check_turn_model(Config())]
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    config = Config.model_validate({"gateway": {"turn_model": "auto"}})
    found = only(software.check_turn_model(config), "problem")
    assert "omnirelay-server[turns]" in found.what

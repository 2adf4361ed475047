"""The doctor on GPUs, with readings of machines that are not here."""

from pathlib import Path
from typing import Any

import pytest

from ops.doctor import gpus
from ops.doctor.finding import Finding
from services.families.family import Paged
from services.families.qwen2_5_omni.files import SYNTHESIS
from services.families.sizes import Model
from shared.config import Config
from shared.devices import EngineReport, Gpu
from shared.model_files import Weights

GIB = 2**30
BIG = Gpu(name="Big", free_bytes=79 * GIB, total_bytes=80 * GIB)
SMALL = Gpu(name="Small", free_bytes=7 * GIB, total_bytes=8 * GIB)
MODEL = Model(
    dtype="bfloat16",
    weights=Weights(22 * GIB, {"thinker": 9 * GIB, "talker": 1 * GIB, "token2wav": GIB // 2}),
    paged={"thinker": Paged(32_768, 32_256), "talker": Paged(32_768, 28_160)},
    synthesis=SYNTHESIS,
)


def look(
    gpus_there: list[Gpu], platform: str = "cuda", model: Model | None = MODEL, **stages: Any
) -> list[Finding]:
    report = EngineReport(torch="2.13.0", cuda="13.0", vllm="0.32.0", platform=platform, gpus=gpus_there)
    return list(gpus.check_devices(Config.model_validate({"stages": stages}), model, report))


def apart() -> dict[str, Any]:
    names = ("thinker", "talker", "token2wav")
    return {name: {"devices": index} for index, name in enumerate(names)}


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All GPUs are visible, and CUDA's compiler is there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))


def test_what_compiles_kernels_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin/nvcc").unlink()
    nvcc, shared = look([BIG])
    assert (nvcc.level, shared.level) == ("ok", "ok")
    assert "no nvcc" in nvcc.what
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    triton = look([BIG])[0]
    assert triton.level == "problem"
    assert f"lacks a C compiler (gcc) and Python.h ({tmp_path})" in triton.what


@pytest.mark.parametrize(("library", "named"), [(("glibc", "2.28"), "glibc 2.28"), (("", ""), "unknown")])
def test_a_c_library_that_is_too_old_is_named(
    library: tuple[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: library)
    found, *_ = look([BIG])
    assert found.level == "problem"
    assert named in found.what
    assert "2.34" in found.what
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.34"))
    assert all(each.level == "ok" for each in look([BIG]))


@pytest.mark.parametrize(
    ("driver", "levels"), [("12.9", ["problem", "problem"]), ("13.0", ["problem"]), (None, ["problem"])]
)
def test_a_driver_that_is_too_old_is_named(driver: str | None, levels: list[str]) -> None:
    """vLLM finds no device then."""
    report = EngineReport(torch="2.13.0", cuda="13.0", vllm="0.32.0", platform="", driver=driver)
    findings = list(gpus.check_devices(Config(), MODEL, report))
    assert [each.level for each in findings] == levels
    assert ("580" in str(findings[0].advice)) == (len(levels) == 2)


def test_a_gpu_for_each_stage() -> None:
    findings = look([BIG, BIG, BIG], **apart())
    assert [finding.level for finding in findings] == ["ok"] * 3
    assert findings[0].what == "GPU 0, Big, 80.0 GiB: the thinker asks for 85% of it"


def test_stages_divide_one_gpu(tmp_path: Path) -> None:
    (finding,) = look([BIG])
    assert finding.level == "ok"
    assert "is shared" in finding.what
    assert "thinker" in finding.what
    assert "for the KV cache" in finding.what
    assert "in turns" in finding.what
    (tmp_path / "control").touch()
    assert "at once" in look([BIG])[0].what
    (finding,) = look([SMALL])
    assert finding.level == "problem"
    assert "Small has 8.0 GiB" in finding.what
    assert "devices" in finding.what
    (finding,) = look([BIG], model=None)
    assert finding.level == "warning"


def test_stages_that_name_their_shares_of_one_gpu() -> None:
    def shares(ratio: float) -> dict[str, Any]:
        return {
            name: {"engine": {"gpu_memory_utilization": ratio}} for name in ("thinker", "talker", "token2wav")
        }

    assert [finding.level for finding in look([BIG], **shares(0.25))] == ["ok"]
    assert [finding.level for finding in look([BIG], **shares(0.4))] == ["problem"]


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = look([BIG, BIG], **apart())
    assert [finding.level for finding in findings] == ["problem", "ok", "ok"]
    assert "the token2wav is given GPU 2; there are 2, counted from 0" in findings[0].what
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert [finding.level for finding in look([BIG])] == ["problem"] * 3


def test_gpus_by_other_names_are_believed() -> None:
    names: dict[str, Any] = {name: {"devices": "GPU-8f6c"} for name in ("thinker", "talker", "token2wav")}
    assert look([BIG], **names) == []


def test_fewer_gpus_than_the_stage_computes_on() -> None:
    stages = apart() | {"thinker": {"devices": "0", "engine": {"tensor_parallel_size": 2}}}
    findings = look([BIG, BIG, BIG], **stages)
    assert findings[0].level == "problem"
    assert "computes on 2 GPUs and is given 1" in findings[0].what


def test_a_stage_that_does_not_fit_its_share() -> None:
    findings = look([SMALL, BIG, BIG], **apart())
    assert findings[0].level == "problem"
    assert findings[0].what == "the thinker needs about 20.0 GiB on Small, its share is 6.8 GiB"
    parallel = {"devices": "0,1,2,3", "engine": {"tensor_parallel_size": 4}}
    others = {"devices": "4", "engine": {"gpu_memory_utilization": 0.4}}
    fits = look([SMALL] * 4 + [BIG], thinker=parallel, talker=others, token2wav=others)
    assert [finding.level for finding in fits] == ["ok"] * 5
    assert "is shared" in fits[4].what
    assert all(finding.level == "ok" for finding in look([SMALL] * 3, model=None, **apart()))


@pytest.mark.parametrize("platform", ["xpu", ""])
def test_platforms_without_stages(platform: str) -> None:
    (finding,) = look([], platform=platform)
    assert finding.level == "problem"
    assert "no stage starts" in finding.what


def test_machines_whose_gpus_are_not_used() -> None:
    (finding,) = look([BIG], platform="cpu")
    assert finding.level == "warning"
    assert "make env DEVICE=gpu" in finding.advice
    (finding,) = look([], platform="cpu", talker={"devices": 0})
    assert finding.level == "problem"
    assert "talker" in finding.what
    assert [finding.level for finding in look([], platform="cpu")] == ["ok"]

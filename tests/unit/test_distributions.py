"""The two distributions, built as by `make wheels`: what each holds, and the client with msgspec alone."""

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import msgspec
import pytest

from tests.support.children import ROOT

pytestmark = pytest.mark.long

SERVER = ("checkpoint", "gateway", "ops", "services", "shared")


@dataclass(frozen=True)
class Wheel:
    """A wheel: its file, and the paths of what it installs beside its metadata."""

    path: Path

    @property
    def files(self) -> set[str]:
        with zipfile.ZipFile(self.path) as archive:
            return {name for name in archive.namelist() if ".dist-info/" not in name}

    @property
    def metadata(self) -> Distribution:
        (info,) = {path for path in zipfile.Path(self.path).iterdir() if path.name.endswith(".dist-info")}
        return PathDistribution(info)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """Build both from a copy of the sources: setuptools leaves files where it builds."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("omnirelay", *SERVER, "deploy/client"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--wheel-dir", "dist", "deploy/client", "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name.partition("-")[0]: Wheel(path) for path in (copy / "dist").iterdir()}


@pytest.fixture(scope="module")
def client(wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client installed into it, and msgspec."""
    folder = tmp_path_factory.mktemp("client")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(folder), str(wheels["omnirelay"].path)], check=True, timeout=120)
    (folder / "msgspec").symlink_to(Path(msgspec.__file__).parent)
    return folder


def run(client: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with that folder and the standard library alone."""
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(client)},
        cwd=client,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def sources(*packages: str) -> set[str]:
    """Every file of some packages."""
    paths = [path for package in packages for path in (ROOT / package).rglob("*")]
    return {str(path.relative_to(ROOT)) for path in paths if path.is_file() and path.suffix != ".pyc"}


def test_each_distribution_holds_its_packages_whole_and_no_other(wheels: dict[str, Wheel]) -> None:
    assert wheels.keys() == {"omnirelay", "omnirelay_server"}
    assert wheels["omnirelay"].files == sources("omnirelay") - sources("omnirelay/server")
    assert wheels["omnirelay_server"].files == sources(*SERVER, "omnirelay/server")


def test_the_server_needs_the_client_of_its_own_version_and_the_client_msgspec_alone(
    wheels: dict[str, Wheel],
) -> None:
    client, server = wheels["omnirelay"].metadata, wheels["omnirelay_server"].metadata
    assert client.version == server.version
    assert f"omnirelay=={client.version}" in (server.requires or [])
    needs = [need for need in client.requires or [] if "extra ==" not in need]
    assert [need.partition(">")[0] for need in needs] == ["msgspec"]


def test_the_client_works_with_msgspec_alone(client: Path, wheels: dict[str, Wheel]) -> None:
    done = run(client, "-c", "from omnirelay import AsyncClient, Client; AsyncClient()")
    assert (done.returncode, done.stderr) == (0, "")
    done = run(client, "bin/omnirelay", "--version")
    assert (done.stdout, done.stderr) == (f"omnirelay {wheels['omnirelay'].metadata.version}\n", "")
    done = run(client, "bin/omnirelay", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "{chat,status,completion}" in done.stdout.replace("COMMAND", "{chat,status,completion}")
    done = run(client, "bin/omnirelay", "status", "--gateway", "tcp://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("omnirelay: gateway_unreachable: ")


def test_completion_without_its_extra_says_what_to_install(client: Path) -> None:
    done = run(client, "bin/omnirelay", "completion", "bash")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("omnirelay: ")
    assert "pip install 'omnirelay[completion]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_arrays_without_numpy_say_what_to_install(client: Path) -> None:
    done = run(client, "-c", "from omnirelay import AudioEvent; AudioEvent(0, bytes(8)).samples")
    assert "pip install 'omnirelay[numpy]'" in done.stderr.splitlines()[-1]

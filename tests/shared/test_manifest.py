"""Manifests: what they list, and which directories they refuse."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from omnirelay.errors import CheckpointError
from shared.manifest import MANIFEST_FILE, read_manifest, verify_manifest, write_manifest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))
    write_manifest(tmp_path)
    return tmp_path


def test_a_manifest_is_what_sha256sum_reads(directory: Path) -> None:
    verify_manifest(directory)
    told = subprocess.check_output(
        ["sha256sum", "--check", "--strict", MANIFEST_FILE], cwd=directory, text=True
    )
    assert told.splitlines() == ["config.json: OK", "model.safetensors: OK"]
    before = read_manifest(directory)
    write_manifest(directory)
    assert read_manifest(directory) == before is not None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda at: (at / "config.json").write_text("[]"), "config.json is damaged"),
        (lambda at: (at / "config.json").unlink(), "differ in config.json"),
        (lambda at: (at / "more.json").touch(), "differ in more.json"),
        (lambda at: (at / MANIFEST_FILE).unlink(), "holds no SHA256SUMS"),
        (lambda at: (at / MANIFEST_FILE).write_text("../x"), "not a digest and a file name"),
        (lambda at: (at / MANIFEST_FILE).write_text(f"{'0' * 64}  ../x"), "not a digest and a file name"),
    ],
)
def test_a_directory_unlike_its_manifest_is_refused(
    directory: Path, change: Callable[[Path], object], problem: str
) -> None:
    change(directory)
    with pytest.raises(CheckpointError, match=problem):
        verify_manifest(directory)


def test_a_directory_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    shutil.rmtree(tmp_path)
    assert read_manifest(tmp_path) is None

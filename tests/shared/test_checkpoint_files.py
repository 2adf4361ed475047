"""Where checkpoints are found, and what they bring besides their model: manifests, and starters."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnirelay.errors import CheckpointError
from services.families.known import require_family
from shared.checkpoints import resolve_model
from shared.config import DEFAULT_CHECKPOINT, Config
from shared.manifest import MANIFEST_FILE, read_manifest, verify_manifest, write_manifest
from shared.starters import (
    MOST_FILE_BYTES,
    MOST_MEDIA_BYTES,
    RECIPE_FILE,
    STARTERS_FILE,
    Starter,
    has_random_weights,
    load_starters,
    read_media,
)
from tests.support.children import ROOT, Log, Patch, python


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


GOOD: list[dict[str, Any]] = [
    {"text": "What is two plus two?"},
    {"audio": "a.wav", "says": "what is one plus one"},
    {"text": "What do you see?", "image": "b.png"},
]


def write(directory: Path, starters: object) -> None:
    (directory / "a.wav").write_bytes(b"RIFF")
    (directory / "b.png").write_bytes(b"PNG")
    (directory / STARTERS_FILE).write_text(json.dumps(starters))


def test_starters_are_read_with_their_files(tmp_path: Path) -> None:
    assert load_starters(tmp_path) == []
    write(tmp_path, GOOD)
    assert load_starters(tmp_path) == [Starter(**each) for each in GOOD]
    assert [each.typed for each in load_starters(tmp_path)] == [True, False, False]
    assert read_media(tmp_path, "b.png") == b"PNG"


@pytest.mark.parametrize(
    "starters",
    [
        {"text": "no list"},
        [{"text": "x" * 201}],
        [{"text": "x", "image": "../b.png"}],
        [{"text": "x", "image": "/etc/passwd"}],
        [{"text": "x", "url": "https://example.org"}],
        [{"text": 3}],
        [{"text": "x"}] * 13,
        [{"text": "x" * 150}] * 12 + [{"text": "y" * MOST_FILE_BYTES}],
    ],
)
def test_a_file_of_another_form_is_not_used(tmp_path: Path, starters: object, caplog: Log) -> None:
    write(tmp_path, starters)
    assert load_starters(tmp_path) == []
    assert f"{STARTERS_FILE} of {tmp_path} is not used" in caplog.text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda at: (at / "b.png").unlink(), "No such file"),
        (lambda at: (at / "b.png").write_bytes(bytes(MOST_MEDIA_BYTES + 1)), "has more than 1048576 bytes"),
    ],
)
def test_a_starter_without_its_file_is_left_out(
    tmp_path: Path, change: Callable[[Path], object], why: str, caplog: Log
) -> None:
    write(tmp_path, [*GOOD, {"says": "nothing to send"}])
    change(tmp_path)
    assert load_starters(tmp_path) == [Starter(**each) for each in GOOD[:2]]
    assert why in caplog.text


@pytest.mark.parametrize(
    ("recipe", "random"),
    [
        (None, False),
        ('{"seed": 0, "shape": {}}', True),
        ('{"trained": true}', False),
        ('{"trained": 1}', False),
        ("{", False),
        (f'{{"trained": false, "more": "{"x" * MOST_FILE_BYTES}"}}', False),
    ],
)
def test_a_checkpoint_says_whether_its_weights_are_random(
    tmp_path: Path, recipe: str | None, random: bool
) -> None:
    if recipe is not None:
        (tmp_path / RECIPE_FILE).write_text(recipe)
    assert has_random_weights(tmp_path) is random


def test_a_checkpoint_of_no_known_family_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "small_omni"}')
    with pytest.raises(
        CheckpointError, match="of type 'small_omni'; known: 'qwen2_5_omni', 'qwen3_omni_moe'"
    ):
        require_family(tmp_path)


def test_who_asks_for_families_loads_no_engine() -> None:
    code = "import sys, services.families.known; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        python("-c", code), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_a_checkpoint_is_found_where_the_configuration_says(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(Config(model=str(tmp_path))) == tmp_path
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory; run `omnirelay checkpoint --size speaking"):
        resolve_model(Config())
    DEFAULT_CHECKPOINT.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"lacks config\.json"):
        resolve_model(Config())
    (DEFAULT_CHECKPOINT / "config.json").write_text("{}")
    assert resolve_model(Config()) == DEFAULT_CHECKPOINT


@pytest.mark.parametrize("model", ["/no/such/place", "../outside", "a/b/c", "name"])
def test_a_model_that_is_neither_directory_nor_hub_id_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint's directory nor a hub id"):
        resolve_model(Config(model=model))


def test_the_hub_is_asked_for_its_ids(tmp_path: Path, monkeypatch: Patch) -> None:
    """The tests are offline, as the hub's library is told by the environment."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(CheckpointError, match="cannot download nobody/nothing from the Hugging Face hub"):
        resolve_model(Config(model="nobody/nothing"))
    (tmp_path / "config.json").write_text("{}")
    asked: list[tuple[str, str | None, list[str] | None]] = []

    def download(hub_id: str, revision: str | None, allow_patterns: list[str] | None) -> str:
        asked.append((hub_id, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model(Config(model="a/b"), ["*.json"]) == tmp_path
    assert resolve_model(Config(model="a/b", revision="0a1b")) == tmp_path
    assert asked == [("a/b", None, ["*.json"]), ("a/b", "0a1b", None)]

"""Checkpoints: the doctor on files that are missing or spoiled, and the one that serves by default."""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omnirelay.errors import CheckpointError
from ops import checkpoint as made
from ops import locks
from ops.doctor import checkpoint
from ops.doctor.finding import Finding
from services.families.memory import Model
from shared.config import DEFAULT_CHECKPOINT, Config
from shared.manifest import MANIFEST_FILE, write_manifest
from tests.gateway.bench import Patch
from tests.gateway.checkpoint_dir import CONFIG, INDEX, SHARDS, write_model, write_weights
from tests.support.children import ROOT

FIRST, SECOND = SHARDS


def look(model: Path | str | None) -> tuple[Model | None, Finding]:
    found, (finding,) = checkpoint.examine(Config(model=None if model is None else str(model)))
    return found, finding


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.mark.parametrize("sharded", [True, False])
def test_a_complete_checkpoint(tmp_path: Path, sharded: bool) -> None:
    model, finding = look(write_model(tmp_path / "model", sharded))
    assert finding.level == "ok"
    assert model is not None
    assert model.weights.elements == {"thinker": 1024, "talker": 500, "token2wav": 100}
    assert model.dtype == "float32"
    # Two layers of keys and values for two heads of 32, and a row of 128.
    for paged in model.paged.values():
        assert (paged.positions, paged.elements, paged.row) == (8192, 2 * 2 * 2 * 32 + 128, 128)


def test_the_compact_checkpoint_of_the_repository() -> None:
    _, finding = look(ROOT / "checkpoint/speaking")
    assert (finding.level, finding.advice) == ("problem", checkpoint.EXPAND)


def test_the_small_checkpoint_that_is_not_made_yet(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    model, finding = look(None)
    assert (model, finding.level) == (None, "warning")
    assert ("omnirelay up" in finding.advice, f"{tmp_path}/.cache" in finding.what) == (True, True)
    write_model(DEFAULT_CHECKPOINT)
    assert look(None)[1].level == "ok"
    (DEFAULT_CHECKPOINT / "tokenizer.json").unlink()
    assert look(None)[1].advice == f"`rm -r {DEFAULT_CHECKPOINT}`: `omnirelay up` makes it again"


def test_a_folder_that_is_not_there() -> None:
    assert look("./nowhere")[1].level == "problem"


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: Patch) -> None:
    """With a cache of the hub's library that is empty, then without the weights, then complete."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, finding = look("some/model")
    assert (model, finding.level) == (None, "warning")
    assert "fetched" in finding.advice
    repository = tmp_path / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = write_model(repository / "snapshots" / "abc")
    (snapshot / FIRST).unlink()
    model, finding = look("some/model")
    assert (model, finding.level) == (None, "warning")
    assert FIRST in finding.what
    write_weights(snapshot / FIRST, SHARDS[FIRST])
    model, finding = look("some/model")
    assert finding.level == "ok"


@pytest.mark.parametrize(
    "name", ["config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", FIRST]
)
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    model, finding = look(directory)
    assert (model, finding.level) == (None, "problem")
    assert name in finding.what
    assert finding.advice


def change_config(directory: Path, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))


def cut(directory: Path) -> None:
    path = directory / SECOND
    path.write_bytes(path.read_bytes()[:-1])


def spoil_speakers(directory: Path, kept: slice) -> None:
    path = directory / "spk_dict.pt"
    path.write_bytes(path.read_bytes()[kept])


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def zip_of(path: Path, name: str, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr(name, bytes(2**20))


def lose_a_tensor(directory: Path) -> None:
    write_weights(directory / SECOND, {"token2wav.a": 100})


def forget_the_talker(directory: Path) -> None:
    (directory / INDEX).unlink()
    write_weights(directory / FIRST, {"thinker.a": 1000})


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (cut, f"{SECOND} is cut short: it has "),
        (lose_a_tensor, f"{SECOND} lacks thinker.b, which {INDEX} places there"),
        (forget_the_talker, "there are no weights of talker"),
        (
            lambda at: (at / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
            "git lfs pull",
        ),
        (lambda at: (at / FIRST).write_bytes(b""), f"{FIRST} is not a safetensors file"),
        (lambda at: (at / FIRST).write_bytes(b"\xff" * 20), "its header has 18446744073709551615 bytes"),
        (lambda at: (at / FIRST).write_bytes(b"\x02" + bytes(7) + b"[]"), "is not a safetensors file"),
        (lambda at: (at / FIRST).write_bytes(b"\x08" + bytes(7) + b'{"a": 1}'), "is not a safetensors file"),
        (lambda at: spoil_speakers(at, slice(0, 2000)), "spk_dict.pt is cut short or damaged"),
        (lambda at: spoil_speakers(at, slice(100, None)), "spk_dict.pt is not a file of torch.save"),
        (lambda at: flip(at / "spk_dict.pt", 2000), "spk_dict.pt is cut short or damaged: Bad CRC-32"),
        (lambda at: flip(at / "spk_dict.pt", -10), "spk_dict.pt is cut short or damaged"),
        (lambda at: (at / "spk_dict.pt").write_bytes(b""), "spk_dict.pt is not a file of torch.save"),
        (lambda at: zip_of(at / "spk_dict.pt", "a/data.pkl", zipfile.ZIP_DEFLATED), "is compressed"),
        (lambda at: zip_of(at / "spk_dict.pt", "photo.jpeg"), "its archive lacks data.pkl"),
        (lambda at: (at / INDEX).write_text("[]"), "a readable index"),
        (lambda at: change_config(at, model_type="qwen3"), "type 'qwen3'"),
        (lambda at: (at / "config.json").write_text("no"), "config.json cannot be read"),
        (lambda at: (at / "config.json").write_text("[]"), "config.json cannot be read"),
        (lambda at: change_config(at, talker_config={}), "config.json lacks a value"),
        (lambda at: change_config(at, thinker_config=3), "config.json lacks a value"),
    ],
)
def test_a_spoiled_checkpoint(directory: Path, spoil: Callable[[Path], object], told: str) -> None:
    spoil(directory)
    model, finding = look(directory)
    assert (model, finding.level) == (None, "problem")
    assert told in finding.what


def test_voices_as_torch_writes_them_are_taken(directory: Path) -> None:
    torch.save({"Ann": torch.ones(9)}, directory / "spk_dict.pt", _use_new_zipfile_serialization=False)
    assert look(directory)[1].level == "ok"
    torch.save({"Ann": torch.ones(9)}, directory / "spk_dict.pt")
    assert look(directory)[1].level == "ok"


AS_NOBODY = """
import encodings.cp437, json, os, sys
from ops.doctor import checkpoint
from shared.checkpoints import resolve_model
from shared.config import Config
from omnirelay.errors import CheckpointAccessError
from services.families.known import require_family
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for model in sys.argv[1:]:
    config = Config(model=model)
    _, (finding,) = checkpoint.examine(config)
    try:
        require_family(resolve_model(config))
        told = None
    except CheckpointAccessError as error:
        told = str(error)
    print(json.dumps([finding.level, finding.what, finding.advice, told]))
"""
CLOSED = {
    FIRST: f"may not read {FIRST} in ",
    "tokenizer.json": "may not read tokenizer.json in ",
    "spk_dict.pt": "may not read spk_dict.pt in ",
    ".": "may not read the directory itself in ",
    "..": "may not read model in ",
}
"""What another user is told where this may not be read."""


def test_files_of_another_user_are_not_called_missing_or_damaged() -> None:
    """Really as another user, if the tests are root."""
    # Not in a folder of pytest's, which only its owner may enter.
    with tempfile.TemporaryDirectory() as outside:
        Path(outside).chmod(0o755)
        readable, *closed = (Path(outside, str(number), "model") for number in range(1 + len(CLOSED)))
        for directory in (readable, *closed):
            write_model(directory)
            for path in (directory.parent, directory, *directory.iterdir()):
                path.chmod(0o755)
        for directory, name in zip(closed, CLOSED, strict=True):
            (directory / name).resolve().chmod(0)
        command = [sys.executable, "-c", AS_NOBODY, str(readable), *map(str, closed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        for directory in closed:
            directory.parent.chmod(0o755)
            directory.chmod(0o755)
    assert done.returncode == 0, done.stderr
    (level, _, _, raised), *others = map(json.loads, done.stdout.splitlines())
    assert (level, raised) == ("ok", None)
    for (level, what, advice, raised), told in zip(others, CLOSED.values(), strict=True):
        assert level == "problem"
        assert told in what
        assert "download" not in advice
        assert told in raised


PLACE = Path(".cache/omnirelay/speaking")


class Maker:
    """Stands where the maker's process is started, as a child that copies the installed files.

    Attributes:
        installed: The compact checkpoint that is installed.
        calls: Sizes that were asked for.
        status: The exit status of the maker.
    """

    def __init__(self, installed: Path) -> None:
        self.installed = installed
        self.calls: list[str] = []
        self.status = 0

    def install(self, content: str) -> None:
        self.installed.mkdir(parents=True, exist_ok=True)
        (self.installed / "config.json").write_text(content)
        write_manifest(self.installed)

    def __call__(self, command: list[str], **_: object) -> Any:
        place = Path(command[command.index("checkpoint") + 1])
        self.calls.append(command[command.index("--size") + 1])
        place.mkdir(parents=True)
        for name in ("config.json", MANIFEST_FILE):
            (place / name).write_bytes((self.installed / name).read_bytes())
        return SimpleNamespace(
            stderr=None, returncode=self.status, wait=int, kill=lambda: None, communicate=lambda: (None, None)
        )


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: Patch) -> Maker:
    """A trained checkpoint is installed, and is the default one."""
    package = tmp_path / "site" / "checkpoint"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    found = Maker(package / "speaking")
    found.install("one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(made, "DEFAULT_CHECKPOINT", PLACE)
    monkeypatch.setattr(subprocess, "Popen", found)
    monkeypatch.delitem(sys.modules, "checkpoint", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if "editable" not in repr(each)])
    return found


def test_the_installed_checkpoint_is_made_once_and_again_after_an_upgrade(maker: Maker) -> None:
    made.ensure(Config())
    made.ensure(Config())
    assert maker.calls == ["speaking"]
    maker.install("two")
    made.ensure(Config())
    assert maker.calls == ["speaking", "speaking"]
    assert (PLACE / "config.json").read_text() == "two"
    assert [path.name for path in PLACE.parent.iterdir()] == ["speaking"]


def test_a_maker_that_fails_leaves_nothing(maker: Maker) -> None:
    maker.status = 1
    with pytest.raises(CheckpointError, match="exit status 1"):
        made.ensure(Config())
    assert not list(PLACE.parent.iterdir())


def test_a_start_waits_for_another_that_makes_it(maker: Maker, monkeypatch: Patch) -> None:
    locked, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(made, "announce", lambda _line: begun.set())

    def other() -> None:
        with locks.locked(PLACE.parent):
            locked.set()
            assert begun.wait(60)
            shutil.copytree(maker.installed, PLACE)

    with ThreadPoolExecutor(1) as starts:
        done = starts.submit(other)
        assert locked.wait(60)
        made.ensure(Config())
        done.result(60)
    assert begun.is_set()
    assert maker.calls == []


def test_a_random_default_needs_nothing_installed(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path(".cache/omnirelay/tiny")
    monkeypatch.setattr(made, "DEFAULT_CHECKPOINT", place)
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    made.ensure(Config())
    assert [path.name for path in place.iterdir()] == ["config.json"]

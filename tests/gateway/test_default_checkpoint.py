"""The checkpoint that serves when no model is chosen: made once, and again where another release needs it."""

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnirelay.errors import CheckpointError
from ops import checkpoint
from shared.config import Config
from shared.manifest import MANIFEST_FILE, write_manifest

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
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """A trained checkpoint is installed, and is the default one."""
    package = tmp_path / "site" / "checkpoint"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    found = Maker(package / "speaking")
    found.install("one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint, "DEFAULT_CHECKPOINT", PLACE)
    monkeypatch.setattr(subprocess, "Popen", found)
    monkeypatch.delitem(sys.modules, "checkpoint", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(sys, "meta_path", [each for each in sys.meta_path if "editable" not in repr(each)])
    return found


def test_the_installed_checkpoint_is_made_once_and_again_after_an_upgrade(maker: Maker) -> None:
    checkpoint.ensure(Config())
    checkpoint.ensure(Config())
    assert maker.calls == ["speaking"]
    maker.install("two")
    checkpoint.ensure(Config())
    assert maker.calls == ["speaking", "speaking"]
    assert (PLACE / "config.json").read_text() == "two"
    assert [path.name for path in PLACE.parent.iterdir()] == ["speaking"]


def test_a_maker_that_fails_leaves_nothing(maker: Maker) -> None:
    maker.status = 1
    with pytest.raises(CheckpointError, match="exit status 1"):
        checkpoint.ensure(Config())
    assert not list(PLACE.parent.iterdir())


def test_a_start_waits_for_another_that_makes_it(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    locked, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(checkpoint, "announce", lambda _line: begun.set())

    def other() -> None:
        with checkpoint._locked(PLACE.parent):
            locked.set()
            assert begun.wait(10)
            shutil.copytree(maker.installed, PLACE)

    with ThreadPoolExecutor(1) as starts:
        done = starts.submit(other)
        assert locked.wait(10)
        checkpoint.ensure(Config())
        done.result(10)
    assert begun.is_set()
    assert maker.calls == []


def test_a_random_default_needs_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place = Path(".cache/omnirelay/tiny")
    monkeypatch.setattr(checkpoint, "DEFAULT_CHECKPOINT", place)
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    checkpoint.ensure(Config())
    assert [path.name for path in place.iterdir()] == ["config.json"]

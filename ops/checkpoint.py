"""``omnirelay checkpoint``, and the default checkpoint: both made by a process of its own.

Making one needs torch and transformers, which neither the gateway nor its command line loads.
"""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from omnirelay.cli.output import note
from omnirelay.cli.progress import ProgressLine
from omnirelay.errors import CheckpointError
from ops.child import GUARD
from ops.console import announce
from ops.doctor.checkpoint import examine
from ops.locks import locked
from shared.config import DEFAULT_CHECKPOINT, Config
from shared.manifest import read_manifest

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status after SIGTERM, as in shells."""


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    return _make(arguments.directory, arguments.size, arguments.seed, arguments.family)


def prepare(config: Config) -> None:
    """Make the default checkpoint if it is needed, and check the files of the checkpoint that is.

    Raises:
        CheckpointError: It could not be made, or a file is missing, unreadable or damaged.
    """
    ensure(config)
    _, findings = examine(config)
    for finding in findings:
        if finding.level == "problem":
            raise CheckpointError(f"{finding.what}: {finding.advice}")


def ensure(config: Config) -> None:
    """Make the default checkpoint if no model is chosen and it is missing, or is of another release.

    Processes that start at the same time wait for the one that makes it.

    Raises:
        CheckpointError: It could not be made.
    """
    if config.model is not None or _is_current():
        return
    size = DEFAULT_CHECKPOINT.name
    announce(f"making the {size} checkpoint in {DEFAULT_CHECKPOINT} ...")
    try:
        with locked(DEFAULT_CHECKPOINT.parent):
            if not _is_current():
                _make_default(size)
    except OSError as error:
        raise CheckpointError(f"the {size} checkpoint could not be put in place: {error}") from error


def _make_default(size: str) -> None:
    """Make it in a temporary folder and rename that: an interrupted attempt leaves no checkpoint."""
    aside = DEFAULT_CHECKPOINT.with_name(f"{DEFAULT_CHECKPOINT.name}.{os.getpid()}")
    try:
        status = _make(aside, size, 0, quiet=True)
        if status != 0:
            raise CheckpointError(f"the {size} checkpoint could not be made: exit status {status}")
        shutil.rmtree(DEFAULT_CHECKPOINT, ignore_errors=True)
        aside.rename(DEFAULT_CHECKPOINT)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_current() -> bool:
    """Whether the default checkpoint is there, and made of the files that are installed."""
    if not (DEFAULT_CHECKPOINT / "config.json").is_file():
        return False
    installed = _installed(DEFAULT_CHECKPOINT.name)
    return installed is None or read_manifest(installed) == read_manifest(DEFAULT_CHECKPOINT)


def _installed(size: str) -> Path | None:
    """Return where the compact form of a trained checkpoint is; none for a random one."""
    # Not imported: that loads PyTorch.
    package = importlib.util.find_spec("checkpoint")
    for folder in (package and package.submodule_search_locations) or ():
        if (Path(folder) / size).is_dir():
            return Path(folder) / size
    return None


def _make(directory: Path, size: str, seed: int, family: str = "qwen2.5-omni", *, quiet: bool = False) -> int:
    """Make a checkpoint in a process of its own; return its exit status; ``quiet``: do not list its files."""
    files = subprocess.DEVNULL if quiet else None
    # It dies with this process, even while it is being started.
    command = [sys.executable, "-I", str(GUARD), str(os.getpid()), sys.executable, "-m", "checkpoint"]
    command += [str(directory), "--family", family, "--size", size, "--seed", str(seed)]
    said: list[str] = []
    with ProgressLine(lambda: _describe(said)) as progress, _sigterm_raises():
        lines = subprocess.PIPE if progress.visible else None
        # As a context manager it would be waited for, whatever happens before the block; its guard ends it.
        process = subprocess.Popen(command, stdout=files, stderr=lines, text=True)  # noqa: S603  Our own program.
        try:
            for line in process.stderr or ():
                said.append(line.rstrip())
            process.wait()
        finally:
            process.kill()
            process.communicate()
    if process.returncode != 0 and said:
        note("\n".join(said))
    return process.returncode


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise :class:`SystemExit`, so that cleanup runs as after SIGINT."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _describe(lines: Sequence[str]) -> str:
    """Summarize the maker's lines, ``thinker, 1.1 million parameters (0.4 s)`` for a finished part."""
    parts = [re.split(r"[,(]", line)[0].strip() for line in lines]
    return f"making the checkpoint, done: {', '.join(parts) or 'nothing yet'}"

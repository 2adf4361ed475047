"""``omnirelay api-key``: make a key for a client of the gateway."""

import argparse
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import yaml

from gateway.access.api_keys import MAX_KEYS, NAME, KeyEntry, hash_of, new_key, read_keys
from omnirelay.cli.output import note, say
from omnirelay.errors import ConfigError, OutputError
from ops.locks import locked
from shared.config import load_config

LIMITS: Final = ("requests_per_second", "burst", "max_requests", "request_bytes", "best_priority")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand: print a new key, once, and add its hash to the file.

    Raises:
        ConfigError: No file is configured, or the name or a limit is invalid.
        OutputError: The file cannot be written.
    """
    path = arguments.file or _configured(arguments.config)
    name: str = arguments.name
    if not NAME.fullmatch(name):
        raise ConfigError(f"the name of a key must match {NAME.pattern}, not {name!r}")
    key = new_key()
    limits = {limit: getattr(arguments, limit) for limit in LIMITS}
    entry = {"sha256": hash_of(key), **{limit: value for limit, value in limits.items() if value is not None}}
    try:
        msgspec.convert(entry, KeyEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"invalid limits for {name!r}: {error}") from error
    try:
        # Two at once would write what they have read, each without the other's key.
        with locked(path.resolve().parent):
            _require_room(path, name)
            _append(path.resolve(), yaml.safe_dump({name: entry}, sort_keys=False), key)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    note(f"shown once: {path} holds only its hash, as {name!r}; a running gateway reads it on SIGHUP")
    return 0


def _configured(config_path: Path | None) -> Path:
    path = load_config(config_path).gateway.api_keys
    if path is None:
        raise ConfigError(
            "the configuration names no file of keys: set gateway.api_keys, or give --file FILE"
        )
    return Path(path)


def _require_room(path: Path, name: str) -> None:
    known = read_keys(path) if path.exists() else {}
    if name in known:
        raise ConfigError(f"{path} has a key {name!r} already: choose another name, or remove that entry")
    if len(known) >= MAX_KEYS:
        raise ConfigError(f"{path} has {MAX_KEYS} keys, which is the limit")


def _append(path: Path, entry: str, key: str) -> None:
    """Add an entry, and print its key.  The file is replaced atomically; a new one is its owner's alone."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text and not text.endswith("\n"):
        text += "\n"
    # mkstemp: readable by its owner only from the start.
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + entry)
        if path.exists():
            # Who reads it is to go on: the gateway may be another user's than the operator.
            there = path.stat()
            with suppress(PermissionError):
                os.chown(made, there.st_uid, there.st_gid)
            os.chmod(made, stat.S_IMODE(there.st_mode))
        _check(Path(made), path)
        # A key that nobody has seen stays out of the file.
        say(key)
        os.replace(made, path)
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise


def _check(made: Path, path: Path) -> None:
    try:
        read_keys(made)
    except ConfigError as error:
        raise ConfigError(f"{path} does not allow an entry to be appended at its end") from error

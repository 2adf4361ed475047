"""CURVE keys of a stack on a cluster: read or made where it is started, written where each process runs."""

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shared.config import Config
from shared.messages import ROLES, Role
from shared.transport.keys import SECRET_MODE, load_keys, make_keys, public_file, secret_file

KeyFiles = Mapping[str, str]
"""Names of key files, and what is in them."""


def gather(config: Config) -> KeyFiles:
    """The keys of all processes: those of ``security.keys``, or new ones.

    Nothing where ``security.internal_network`` declares that none are needed.

    Raises:
        OmniRelayError: The configured ones cannot be read, or none can be made.
    """
    if config.security.keys is not None:
        return _read(Path(config.security.keys))
    if config.security.internal_network:
        return {}
    with tempfile.TemporaryDirectory(prefix="omnirelay-keys-") as folder:
        make_keys(Path(folder), replace=True)
        return _read(Path(folder))


def _read(directory: Path) -> KeyFiles:
    for kind in ROLES:
        load_keys(directory, kind)
    files = [named(directory, kind) for kind in ROLES for named in (public_file, secret_file)]
    return {path.name: path.read_text(encoding="ascii") for path in files}


def keys_for(kind: Role, files: KeyFiles) -> KeyFiles:
    """What one process needs: all public keys, and its own secret."""
    own = secret_file(Path(), kind).name
    return {name: text for name, text in files.items() if name == own or not name.endswith(".key_secret")}


def remove_at_end(directory: Path) -> "subprocess.Popen[bytes]":
    """Have a directory removed when this process ends, also when it is killed."""
    # Its standard input ends with us; in a session of its own, no signal to our group reaches it.
    script = 'trap "" HUP INT TERM; read -r _; rm -rf -- "$1"'
    command = ["/bin/sh", "-c", script, "sh", str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # noqa: S603 - no word of it is a client's


def write(files: KeyFiles, directory: Path) -> None:
    """Write them into a directory that only this user may enter."""
    for name, text in files.items():
        path = directory / name
        path.touch(mode=SECRET_MODE)
        path.write_text(text, encoding="ascii")

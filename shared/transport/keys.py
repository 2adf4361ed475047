"""The key files of CURVE: ``ROLE.key``, public, and ``ROLE.key_secret``, for that role's process.

The format is that of pyzmq's certificates, so other tools read them; secret files are created private.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq

from omnirelay.errors import ConfigError, OutputError
from shared.messages import ROLES, Role

PUBLIC_MODE: Final = 0o644
SECRET_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
MAX_FILE_BYTES: Final = 4096
_LINE: Final = r'^\s*{}\s*=\s*"([!-~]{{40}})"\s*$'
_PUBLIC: Final = re.compile(_LINE.format("public-key"), re.MULTILINE)
_SECRET: Final = re.compile(_LINE.format("secret-key"), re.MULTILINE)


@dataclass(frozen=True)
class Keys:
    """A process's role and secret key, and the public keys of all roles; in Z85."""

    role: Role
    secret: bytes = field(repr=False)
    public: Mapping[Role, bytes]


def public_file(directory: Path, role: Role) -> Path:
    """The file of a role's public key."""
    return directory / f"{role}.key"


def secret_file(directory: Path, role: Role) -> Path:
    """The file of a role's secret key."""
    return directory / f"{role}.key_secret"


def require_curve() -> None:
    """Raise :class:`ConfigError` if ZeroMQ was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            "security.keys is set, and this ZeroMQ was built without CURVE: "
            "install pyzmq's own wheel (`pip install --force-reinstall --only-binary :all: pyzmq`)"
        )


def make_keys(directory: Path, replace: bool) -> list[Path]:
    """Generate and write a key pair for each role; returns the files, public before secret of each role.

    Raises:
        ConfigError: ZeroMQ was built without CURVE.
        OutputError: There are keys and ``replace`` is false, or a file cannot be written.
    """
    require_curve()
    files = [named(directory, role) for role in ROLES for named in (public_file, secret_file)]
    there = [path.name for path in files if path.exists()]
    if there and not replace:
        raise OutputError(
            f"{directory} already has {', '.join(there)}; nothing was changed: choose another directory, "
            "or --force to give every process new keys"
        )
    try:
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        for role in ROLES:
            public, secret = (key.decode() for key in zmq.curve_keypair())
            pair = f'    public-key = "{public}"\n'
            _write(public_file(directory, role), f"# The {role}'s public key.\ncurve\n{pair}", PUBLIC_MODE)
            both = f'{pair}    secret-key = "{secret}"\n'
            about = f"# The {role}'s SECRET key, for its process alone.\ncurve\n"
            _write(secret_file(directory, role), about + both, SECRET_MODE)
    except OSError as error:
        raise OutputError(f"the keys cannot be written: {error.filename}: {error.strerror}") from error
    return files


def load_keys(directory: Path, role: Role) -> Keys:
    """Read a role's secret key, and the public keys of all roles.

    Raises:
        ConfigError: ZeroMQ was built without CURVE, or a file is missing, invalid, of another pair, or a
            secret readable by others.
    """
    require_curve()
    public = {each: _key(public_file(directory, each), _PUBLIC) for each in ROLES}
    if len(set(public.values())) < len(ROLES):
        raise ConfigError(f"{directory}: two roles have the same key; make new ones with `omnirelay keys`")
    path = secret_file(directory, role)
    secret = _key(path, _SECRET, private=True)
    if zmq.curve_public(secret) != public[role]:
        raise ConfigError(
            f"{path} does not belong to {public_file(directory, role)}: copy both from where they were made"
        )
    return Keys(role, secret, public)


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file whose mode is set before its content."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="ascii") as file:
        # Independent of the umask.
        os.fchmod(descriptor, mode)
        file.write(text)


def is_open_to_others(status: os.stat_result) -> bool:
    """Whether others than this user may read or write a secret file.

    A group may read one of root's: so a mounted secret reaches a process that is not root.
    """
    group = stat.S_IRGRP if status.st_uid == 0 and os.geteuid() != 0 else 0
    return bool(status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~group)


def _key(path: Path, pattern: re.Pattern[str], private: bool = False) -> bytes:
    """Read the key of a file; with ``private``, only its owner may be able to read it."""
    try:
        # A pipe of that name must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is no file: security.keys needs the files of `omnirelay keys`")
            if private and is_open_to_others(status):
                raise ConfigError(
                    f"{path} may be read by others (mode {stat.S_IMODE(status.st_mode):04o}): "
                    f"`chmod 600 {path}`, and new keys if somebody may have read it"
                )
            content = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {path}: {error.strerror}; `omnirelay keys DIR` makes keys, "
            "and each process needs all *.key files and its own .key_secret in security.keys"
        ) from error
    found = pattern.search(content.decode("ascii", "replace"))
    if found is None:
        raise ConfigError(f"{path} holds no key of CURVE: copy it again, or make new ones")
    key = found[1].encode()
    try:
        # Only a check: any 32 bytes in Z85 make a public key.
        zmq.curve_public(key)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"{path} holds no key of CURVE: {error}; copy it again, or make new ones"
        ) from error
    return key

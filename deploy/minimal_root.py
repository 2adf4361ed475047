"""Copy what a program in a virtual environment needs of this system into an empty root file system.

    python deploy/minimal_root.py TARGET VENV

That is: the interpreter with its standard library, the shared libraries that it and the environment's
extension modules are linked to, the certificates, and the files that name the user.  No shell, no package
manager.  Everything keeps its path.  It is run while the gateway's image is built.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

USER: Final = "omnirelay:x:10001:10001::/tmp:/sbin/nologin\n"
GROUP: Final = "omnirelay:x:10001:\n"
SYSTEM_FILES: Final = ("/etc/ssl/certs/ca-certificates.crt", "/etc/ld.so.cache", "/etc/nsswitch.conf")
UNUSED: Final = (
    "_dbm.*",
    "config-*",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "nis.*",
    "pydoc_data",
    "site-packages",
    "test",
    "tkinter",
    "turtledemo",
)
"""Of the standard library: what no server loads, and the modules that alone need large libraries."""


def main() -> None:
    """Fill the target."""
    target, venv = (Path(argument) for argument in sys.argv[1:])
    library = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(library, within(target, library), ignore=shutil.ignore_patterns(*UNUSED))
    copy_linked(target, Path(sys.executable))
    programs = [Path(sys.executable).resolve(), *target.rglob("*.so"), *venv.rglob("*.so*")]
    for library in sorted(set(libraries(programs))):
        if not library.is_relative_to(venv):
            copy_linked(target, library)
    for name in SYSTEM_FILES:
        copy_linked(target, Path(name))
    within(target, Path("/etc/passwd")).write_text(USER, encoding="utf-8")
    within(target, Path("/etc/group")).write_text(GROUP, encoding="utf-8")
    (target / "tmp").mkdir()
    (target / "tmp").chmod(0o1777)


def within(target: Path, path: Path) -> Path:
    """Give the place of an absolute path under the target."""
    return target / path.relative_to("/")


def copy_linked(target: Path, path: Path) -> None:
    """Copy a file; if it is a symbolic link, the link and what it leads to.

    Links between folders (``/lib``) are not kept: below them a file is copied under each name it is known by.
    """
    copy = within(target, path)
    copy.parent.mkdir(parents=True, exist_ok=True)
    if not os.path.lexists(copy):
        shutil.copy2(path, copy, follow_symlinks=False)
    if path.is_symlink():
        copy_linked(target, Path(os.path.normpath(path.parent / path.readlink())))


def libraries(files: Iterable[Path]) -> Iterator[Path]:
    """Give the shared libraries that the dynamic linker loads with these files, and the linker itself."""
    for file in files:
        told = subprocess.run(["ldd", file], capture_output=True, text=True, check=False)  # noqa: S603, S607
        for name in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", told.stdout, re.MULTILINE):
            yield Path(os.path.normpath(name))


if __name__ == "__main__":
    main()

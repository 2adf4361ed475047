#!/usr/bin/env python3
"""Fetch the web page's libraries, as they were released, into ``gateway/http/page/static/vendor``.

    .venv/bin/python scripts/vendor.py

Browsers load them from the gateway, never from elsewhere, so they are part of the repository.
``tests/unit/test_vendor.py`` holds the files to the digests below.
"""

import base64
import hashlib
import io
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parent.parent / "gateway" / "http" / "page" / "static" / "vendor"
REGISTRY: Final = "https://registry.npmjs.org"


@dataclass(frozen=True)
class Library:
    """A released package, and the one file of it that the page loads.

    Attributes:
        name: In the registry.
        version: Of the release.
        integrity: Base64 of the archive's SHA-512.
        member: The file's path in the archive.
        sha256: Of the file.
    """

    name: str
    version: str
    integrity: str
    member: str
    sha256: str

    @property
    def file(self) -> Path:
        """Where the file is kept."""
        return FOLDER / Path(self.member).name

    def fetch(self) -> bytes:
        """Download the file.

        Raises:
            ValueError: The registry gives another archive than the one that was looked at.
        """
        url = f"{REGISTRY}/{self.name}/-/{self.name}-{self.version}.tgz"
        with urllib.request.urlopen(url, timeout=60) as response:
            archive: bytes = response.read()
        if base64.b64encode(hashlib.sha512(archive).digest()).decode() != self.integrity:
            raise ValueError(f"{url} is not the archive whose SHA-512 is {self.integrity}")
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            member = files.extractfile(self.member)
            if member is None:
                raise ValueError(f"{url} has no file {self.member}")
            return member.read()


LIBRARIES: Final = (
    Library(
        "marked",
        "18.2.1",
        "ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        "package/lib/marked.esm.js",
        "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
    ),
    Library(
        "dompurify",
        "3.4.18",
        "ofe3wI/uNm68HInABYFJYqQxRw1EaKAjNdrFVKqjUY+UZurvNd2L/HuQe097s/4RivWiZyP6tT7aoT8atjfhwg==",
        "package/dist/purify.min.js",
        "8053ee2a6a09f9d50f7fcd6fb7f07072f52c7f3fa9aa12147cab4feaf65ee970",
    ),
)


def main() -> int:
    """Fetch all libraries; return the exit status."""
    for library in LIBRARIES:
        library.file.write_bytes(library.fetch())
        sys.stdout.write(f"{library.file}: {library.name} {library.version}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The web page's libraries are what was released, and what is looked at when they are renewed."""

import hashlib
from pathlib import Path

import pytest

from scripts.vendor import FOLDER, LIBRARIES, Library

LICENCES = Path(__file__).resolve().parents[2] / "docs" / "licences.md"


@pytest.mark.parametrize("library", LIBRARIES, ids=[each.name for each in LIBRARIES])
def test_a_library_is_the_released_one_and_its_licence_is_listed(library: Library) -> None:
    assert hashlib.sha256(library.file.read_bytes()).hexdigest() == library.sha256
    assert f"`{library.name}` {library.version}" in LICENCES.read_text(encoding="utf-8")


def test_nothing_else_is_there() -> None:
    assert {each.file for each in LIBRARIES} == set(FOLDER.iterdir())

"""The web page's libraries are what was released, and what is looked at when they are renewed."""

import re
import subprocess

from tests.support.children import ROOT

FOLDER = ROOT / "gateway" / "http" / "page" / "static" / "vendor"


def test_the_libraries_are_the_released_ones_and_their_licences_are_listed() -> None:
    digests = ROOT / "scripts" / "vendor.sha256"
    subprocess.run(["sha256sum", "--check", str(digests)], cwd=ROOT, check=True)
    checked = {ROOT / line.split()[1] for line in digests.read_text(encoding="utf-8").splitlines()}
    assert checked == set(FOLDER.iterdir())
    licences = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    (vendored,) = re.findall("VENDORED := (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    for name, version in re.findall(r"(\w+)@([\d.]+)/", vendored):
        assert f"`{name}` {version}" in licences

"""Workers divide the tests so that none starts what another has, and hear of one that dies."""

import subprocess
from pathlib import Path

import pytest

from tests.support.children import ROOT, python
from tests.support.parallel import FIRST, group_of

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(6))
def test_that_says_who_runs_it(number):
    with open({told!r}, "a") as told:
        print({name!r}, os.environ["PYTEST_XDIST_WORKER"], file=told)

def test_that_ends_its_worker():
    if {dies}:
        os._exit(3)
"""


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/stack/test_http.py::test_a", "stack"),
        ("tests/thinker/test_thinker_text.py::test_a[b::c]", "thinker"),
        ("tests/thinker/test_media_image.py::test_a", "tests/thinker/test_media_image.py"),
        ("tests/gateway/test_keys.py::test_a", "tests/gateway/test_keys.py"),
    ],
)
def test_what_shares_an_engine_or_a_stack_stays_together(nodeid: str, group: str) -> None:
    assert group_of(nodeid) == group


def test_what_comes_first_is_there() -> None:
    """Else a file that was renamed would come last again, unnoticed."""
    assert all((ROOT / name).is_file() for name in FIRST if name.endswith(".py"))


def run_with_two_workers(folder: Path, dies: bool) -> "subprocess.CompletedProcess[str]":
    for name in ("a", "b"):
        text = TESTS.format(told=str(folder / "told"), name=name, dies=dies and name == "a")
        (folder / f"test_{name}.py").write_text(text)
    return subprocess.run(
        python(
            *["-m", "pytest", "-p", "tests.support.parallel", "-p", "no:cacheprovider", "-p", "no:cov"],
            *["-c", "/dev/null", "--numprocesses=2", "--max-worker-restart=0", str(folder)],
        ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_file_is_run_by_one_worker(tmp_path: Path) -> None:
    done = run_with_two_workers(tmp_path, dies=False)
    assert done.returncode == 0, done.stdout
    told = [line.split() for line in (tmp_path / "told").read_text().splitlines()]
    assert len(told) == 12
    assert {len({worker for name, worker in told if name == each}) for each in "ab"} == {1}


def test_a_worker_that_dies_fails_the_run(tmp_path: Path) -> None:
    done = run_with_two_workers(tmp_path, dies=True)
    assert done.returncode == 1, done.stdout
    assert "crashed while running" in done.stdout
    assert "test_that_ends_its_worker" in done.stdout

"""The tests cannot stand still: a child that does not end is killed, and a run that hangs is ended."""

import ast
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.children import ROOT, Child, python

NEVER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); time.sleep(3600)"
TEST = """
import signal
import threading

def test_one():
    pass

def test_that_no_exception_can_end():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()
"""
FIXTURE = """
import pytest
import threading

@pytest.fixture
def hanging():
    yield
    threading.Event().wait()

def test_whose_fixture_hangs_after_it_has_failed(hanging):
    threading.Event().wait()
"""


def test_a_child_that_does_not_end_is_killed_whatever_has_failed() -> None:
    child = Child(python("-c", NEVER), stdout=subprocess.PIPE)

    def fail() -> None:
        with child:
            assert child.stdout is not None
            assert child.stdout.readline()
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    assert child.returncode == -signal.SIGKILL


@pytest.mark.parametrize("text", [TEST, FIXTURE])
def test_a_run_that_hangs_is_ended_and_says_where(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_hanging.py").write_text(text)
    started = time.monotonic()
    done = subprocess.run(
        python(
            *["-m", "pytest", "-p", "tests.support.limits", "-p", "no:cacheprovider", "-p", "no:cov"],
            *["-c", "/dev/null", "-o", "timeout=1", "-o", "hang_s=1", str(tmp_path)],
        ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert time.monotonic() - started < 50
    assert "Timeout (0:00:02)!" in done.stderr
    assert "test_hanging.py" in done.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_test_waits_for_a_child_without_end(path: Path) -> None:
    """As leaving the block of ``with subprocess.Popen(...)`` does; Child kills it there."""
    blocks = [
        ast.unparse(item.context_expr)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.With)
        for item in node.items
    ]
    assert [block for block in blocks if block.startswith("subprocess.Popen(")] == []

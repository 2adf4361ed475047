"""A limit on each test that nothing can ignore: no run of the tests stands still.

pytest-timeout raises an exception in a test that takes too long, once.  A test that catches it, a fixture's
end that hangs, or code that holds the interpreter's lock goes on.  Some time behind that this limit tells
where each thread is and ends the whole run; it needs no lock, and no Python code.
"""

import faulthandler
import os
from collections.abc import Iterator
from typing import Final

import pytest

END_S: Final = 600.0
"""For what comes behind the last test: reports, coverage, the interpreter's own end."""
_PLACE: Final = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("hang_s", "seconds behind a test's timeout until the run is ended", default="60")


def pytest_configure(config: pytest.Config) -> None:
    # Another one than standard error's, which is captured while tests run.
    config.stash[_PLACE] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _limit(item.config, _limit_of(item))
    try:
        return (yield)
    finally:
        _limit(item.config, END_S)


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Begin again: pytest has just ended its own timer, which is the same, for the sake of debuggers."""
    if isinstance(node, pytest.Item):
        _limit(node.config, _limit_of(node))


def _limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    timeout = marker.args[0] if marker is not None else item.config.getini("timeout")
    return float(timeout) + float(item.config.getini("hang_s"))


def _limit(config: pytest.Config, seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=config.stash[_PLACE])

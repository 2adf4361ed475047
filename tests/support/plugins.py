"""What pytest does in these tests: a limit on each one, and how workers divide them."""

import faulthandler
import gc
import os
from collections.abc import Iterator
from typing import Any, Final

import pytest

END_S: Final = 600.0
"""For what comes behind the last test: reports, coverage, the interpreter's own end."""
_PLACE: Final = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("hang_s", "seconds behind a test's timeout until the run is ended", default="60")


def pytest_configure(config: pytest.Config) -> None:
    # Another one than standard error's, which is captured while tests run.
    config.stash[_PLACE] = os.dup(2)


def pytest_collection_finish() -> None:
    """Leave out of each later collection of garbage what is loaded now: engines collect several times."""
    gc.collect()
    gc.freeze()


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


TOGETHER: Final = {
    "stack": "tests/stack/",
    "speaking": "tests/quality/test_speaking.py",
    "quality": "tests/quality/",
    "clients": "tests/clients/",
    "page": "tests/page/",
    "training": "tests/training/test_training_parts.py",
    "monitoring": "tests/monitoring/",
    "thinker": "tests/thinker/test_thinker_",
    "talker": "tests/talker/",
    "token2wav": "tests/token2wav/",
}
"""Tests that share what their conftest makes; of those that run beside each other, the longest first."""
LONG_FILES: Final = ("tests/gateway/test_processes.py", "tests/stages/test_resume.py")
"""Files of half a minute or more, each."""
FIRST: Final = (*TOGETHER, *LONG_FILES)


def group_of(nodeid: str) -> str:
    """What a test is kept together with."""
    for group, prefix in TOGETHER.items():
        if nodeid.startswith(prefix):
            return group
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - only where there are workers

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            # Long tests have stacks of their own.
            return nodeid.partition("::")[0] if config.option.markexpr == "long" else group_of(nodeid)

    # By how many tests a group has otherwise, which says nothing of how long it takes.
    config.option.loadscopereorder = False
    return ByGroup(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {group: place for place, group in enumerate(FIRST)}
        items.sort(key=lambda item: places.get(group_of(item.nodeid), len(places)))

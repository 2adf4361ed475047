"""How workers (``pytest -n``) divide the tests: those that share a stack or an engine go to one of them.

The other tests are divided by file.  What takes longest comes first, so that the workers end together.
"""

from typing import Any, Final

import pytest

TOGETHER: Final = {
    "stack": "tests/stack/",
    "clients": "tests/clients/",
    "quality": "tests/quality/",
    "training": "tests/training/test_training_parts.py",
    "page": "tests/page/",
    "monitoring": "tests/monitoring/",
    "thinker": "tests/thinker/test_thinker_",
    "talker": "tests/talker/",
    "token2wav": "tests/token2wav/",
}
"""Tests that share what their conftest makes."""
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

"""What a stack does while nobody asks it for anything."""

from pathlib import Path

from omnirelay import Client
from tests.support.stack import RunningStack

GROUPS = 3
"""The world's process groups: vLLM needs them to build an engine."""


def threads(pid: int | None) -> list[str]:
    return [(each / "comm").read_text().strip() for each in Path(f"/proc/{pid}/task").iterdir()]


def test_stages_keep_no_process_groups_of_one(stack: RunningStack):
    """Each has a thread that wakes a hundred times a second."""
    with Client(stack.address) as client:
        pids = {stage.name: stage.pid for stage in client.status().stages}
    assert set(pids) == {"thinker", "talker", "token2wav"}
    for name, pid in pids.items():
        groups = [thread for thread in threads(pid) if thread.startswith("gloo")]
        assert len(groups) == GROUPS, (name, groups)

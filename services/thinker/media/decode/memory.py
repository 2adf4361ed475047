"""The memory of a process that works on what strangers sent."""

import resource
from pathlib import Path


def bound_memory(further: int) -> None:
    """Let allocations fail beyond so many further bytes, and crashes leave no core."""
    # Seventh column of proc_pid_statm(5): what RLIMIT_DATA counts, and the stack.
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    bound = pages * resource.getpagesize() + further
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = bound if most == resource.RLIM_INFINITY else min(bound, most)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

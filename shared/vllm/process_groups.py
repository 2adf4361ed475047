"""Ends the process groups of an engine that has nobody to talk to.

vLLM makes a dozen whatever the number of devices, and each keeps a thread of Gloo's that wakes a hundred
times a second, used or not (https://github.com/pytorch/gloo/issues/246).
"""

from collections.abc import Callable
from typing import Final

from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_dcp_group,
    get_dp_group,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
    model_parallel_is_initialized,
)

_GROUPS: Final[tuple[Callable[[], GroupCoordinator], ...]] = (
    get_tp_group,
    get_pp_group,
    get_dp_group,
    get_dcp_group,
    get_pcp_group,
)


def end_groups_of_one() -> None:
    """End the groups of one member, but for the world's, by which vLLM knows where to make others.

    vLLM sends nothing within a group of one.  What it asks of a group later, its size and its own place in
    it, the group still tells.  With a model in other processes there are none here.
    """
    if not model_parallel_is_initialized():
        return
    for group_of in _GROUPS:
        group = group_of()
        if group.world_size == 1:
            group.destroy()

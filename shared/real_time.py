"""Real-time priority for threads that move data, above those that compute; see docs/operations.md."""

import logging
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import zmq

_PRIORITY: Final = 1
"""The lowest real-time priority, above every ordinary thread."""
log = logging.getLogger(__name__)


def set_realtime_priority_of(context: zmq.Context[Any]) -> None:
    """Give a context's future I/O threads real-time priority, where the system allows it.

    In the ordinary class they would wait for the time slice of a compute thread, so a busy stage would send
    late.  Linux allows the class to root, and to users with a limit ``rtprio`` of at least 1.

    Args:
        context: It has no sockets yet.
    """
    # Tried in a thread that ends: libzmq does not check whether it is allowed.
    with ThreadPoolExecutor(1) as probe:
        allowed = probe.submit(set_realtime_priority).result()
    if allowed:
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_RR)
        context.set(zmq.THREAD_PRIORITY, _PRIORITY)


def set_realtime_priority() -> bool:
    """Give the calling thread real-time priority, not the threads it starts; False if that is not allowed.

    For a thread that mostly waits, and whose work others wait for.
    """
    if sys.platform != "linux":
        return False
    if resource.getrlimit(resource.RLIMIT_RTTIME)[0] != resource.RLIM_INFINITY:
        # A thread that computes longer than that without sleeping is killed; encryption may take long.
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))
    except OSError as error:
        log.debug("no real-time priority: %s", error)
        return False
    return True

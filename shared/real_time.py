"""Who moves bytes goes before who computes: ZeroMQ's own threads, and the gateway's loop."""

import logging
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import zmq

_PRIORITY: Final = 1
"""The lowest of the real-time class, which goes before every other thread."""
log = logging.getLogger(__name__)


def set_realtime_priority_of(context: zmq.Context[Any]) -> None:
    """Give the threads that a context will have a real-time priority, where the system allows it.

    They move bytes and sleep.  Yet among threads of the ordinary class theirs wait like others until the one
    that runs has had its time slice, and that of the whole process counts, so that a stage that computes much
    sends late.  Linux gives the class to root, and to whoever has a limit ``rtprio`` of at least one.

    Args:
        context: It has no sockets yet.
    """
    # Asked in a thread that ends: what a thread is allowed, libzmq takes for granted.
    with ThreadPoolExecutor(1) as probe:
        allowed = probe.submit(set_realtime_priority).result()
    if allowed:
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_RR)
        context.set(zmq.THREAD_PRIORITY, _PRIORITY)


def set_realtime_priority() -> bool:
    """Give the calling thread that priority, where the system allows it; not those that it starts.

    For a thread that mostly waits, and whose work others wait for: what it takes of a processor nobody else
    has.

    Returns:
        Whether it has it.
    """
    if sys.platform != "linux":
        return False
    if resource.getrlimit(resource.RLIMIT_RTTIME)[0] != resource.RLIM_INFINITY:
        # Who computes for longer than that in one go is killed; encrypting much may take long.
        return False
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))
    except OSError as error:
        log.debug("no real-time priority: %s", error)
        return False
    return True

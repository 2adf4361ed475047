"""Threads that move bytes have a real-time priority where the system allows it, and do without where not."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.real_time import set_realtime_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have other scheduling classes")

# Prints the scheduling classes of its threads when a message has gone through a socket.  ZeroMQ's threads
# choose theirs themselves as they start, which may be later.
PROGRAM = """
import json, os, resource, time
from shared.config import Config
from shared.transport.curve import open_context
import zmq
{before}
context = open_context(Config(), "gateway")
pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
push.connect(f"tcp://127.0.0.1:{{pull.bind_to_random_port('tcp://127.0.0.1')}}")
push.send(b"here")
received = pull.recv().decode()
until = time.monotonic() + 10
while True:
    classes = {{int(thread): os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}}
    main = classes.pop(os.getpid())
    if list(classes.values()).count(os.SCHED_RR) == {wanted} or time.monotonic() > until:
        break
    time.sleep(0.01)
print(json.dumps([received, main, sorted(classes.values())]))
context.destroy(linger=0)
"""
UNPRIVILEGED = """
resource.setrlimit(resource.RLIMIT_RTPRIO, (0, 0))
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
"""


BOUNDED = "resource.setrlimit(resource.RLIMIT_RTTIME, (10**6, 10**6))"
LOOP = """
import json, os, resource, threading
from shared.real_time import set_realtime_priority
{before}
inside = []
went = set_realtime_priority()
thread = threading.Thread(target=lambda: inside.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
reading, writing = os.pipe()
if os.fork() == 0:
    os.write(writing, b"%d" % os.sched_getscheduler(0))
    os._exit(0)
child = int(os.read(reading, 20))
print(json.dumps([went, os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, *inside, child]))
"""


def classes_of(wanted: int, before: str = "") -> tuple[str, int, list[int]]:
    program = [sys.executable, "-c", PROGRAM.format(before=before, wanted=wanted)]
    done = subprocess.run(program, capture_output=True, timeout=60, check=True, text=True)
    received, main, others = json.loads(done.stdout)
    return received, main, others


def allowed() -> bool:
    with ThreadPoolExecutor(1) as probe:
        return probe.submit(set_realtime_priority).result()


def test_they_go_first_and_nothing_else_does() -> None:
    if not allowed():
        pytest.skip("this user may not have real-time threads")
    received, main, others = classes_of(2)
    # Besides the guard: one thread that reaps closed sockets, one that moves bytes.
    assert (received, main, others) == ("here", os.SCHED_OTHER, [os.SCHED_OTHER, *[os.SCHED_RR] * 2])


def test_without_the_right_messages_come_all_the_same() -> None:
    received, main, others = classes_of(0, UNPRIVILEGED)
    assert (received, main, others) == ("here", os.SCHED_OTHER, [os.SCHED_OTHER] * 3)


@pytest.mark.parametrize("before", ["", UNPRIVILEGED, BOUNDED])
def test_a_loop_goes_first_and_what_it_starts_does_not(before: str) -> None:
    program = [sys.executable, "-c", LOOP.format(before=before)]
    done = subprocess.run(program, capture_output=True, timeout=60, check=True, text=True)
    expected = not before and allowed()
    own = os.SCHED_RR if expected else os.SCHED_OTHER
    assert json.loads(done.stdout) == [expected, own, os.SCHED_OTHER, os.SCHED_OTHER]

"""Threads that go first, the playback clock, who waits by it, and how large the pieces of prompts are."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shared.playback import PATIENCE_S, PlaybackClock, has_slack
from shared.real_time import set_realtime_priority
from shared.vllm.generating import FIRST_TOKENS, MIN_TOKENS, SLOWDOWN, PieceSize

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


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by a test."""
    moment = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    return moment


def test_a_stream_is_due_at_once_and_then_when_it_has_been_heard(now: list[float]) -> None:
    clock = PlaybackClock(streaming=True)
    assert clock.due == 1000.0
    now[0] = 1003.0
    clock.made(0.5)
    assert clock.due == 1003.5
    now[0] = 1003.2
    clock.made(2.0)
    assert clock.due == 1005.5
    clock.made(0.0)
    assert clock.due == 1005.5


def test_who_ran_dry_goes_on_listening_when_there_is_more(now: list[float]) -> None:
    clock = PlaybackClock(streaming=True)
    clock.made(1.0)
    now[0] = 1004.0
    clock.made(1.0)
    assert clock.due == 1005.0


def test_an_answer_wanted_whole_has_one_time(now: list[float]) -> None:
    clock = PlaybackClock(streaming=False)
    clock.made(60.0)
    assert clock.due == 1000.0 + PATIENCE_S


def test_those_far_ahead_wait_while_somebody_is_not(now: list[float]) -> None:
    del now
    due = {"new": 1000.0, "soon": 1000.9, "ahead": 1001.1, "far": 1060.0}
    assert has_slack(due, 1.0) == {"ahead", "far"}
    assert has_slack(due, 100.0) == set()


def test_nobody_waits_for_nobody(now: list[float]) -> None:
    del now
    assert has_slack({}, 1.0) == set()
    assert has_slack({"a": 1060.0, "b": 1070.0}, 1.0) == set()
    assert has_slack({"a": 1000.0, "b": 1070.0}, 0.0) == set()


ROW_S = 0.02


def settled(without_s: float, per_token_s: float) -> tuple[int, float]:
    """The size of pieces after some steps of a machine, and how long a step with one takes."""
    size = PieceSize(2048)
    for _ in range(30):
        size.took(without_s, 0, ROW_S)
        size.took(without_s + per_token_s * size.tokens, size.tokens, ROW_S)
    return size.tokens, without_s + per_token_s * size.tokens


@pytest.mark.parametrize(
    ("without_s", "per_token_s"), [(0.004, 5e-5), (0.015, 1e-4), (0.1, 1e-3), (0.5, 0.01)]
)
def test_a_step_with_a_piece_lasts_a_row_or_twice_one_without(without_s: float, per_token_s: float) -> None:
    tokens, seconds = settled(without_s, per_token_s)
    assert MIN_TOKENS < tokens < 2048
    assert seconds == pytest.approx(max(ROW_S, SLOWDOWN * without_s), rel=0.1)


def test_pieces_have_bounds_and_other_steps_do_not_count() -> None:
    assert settled(0.001, 1.0)[0] == MIN_TOKENS
    assert settled(0.001, 1e-9)[0] == 2048
    assert PieceSize(8).tokens == 8
    size = PieceSize(2048)
    size.took(100.0, 700, ROW_S)
    assert size.tokens == FIRST_TOKENS

"""Credits over real sockets: memory, restarts, and a stage that gives and takes them."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from shared.messages import CodecTokens, Credit, Mark, StageEvent
from shared.transport.queues import PullQueue, PushQueue
from shared.transport.wire import encode
from tests.shared.stages import STAGE, Harness, running
from tests.shared.support import (
    ANY_PORT,
    Context,
    bound_at,
    endpoint,
    free_address,
    sending,
    take,
    take_frames,
    wait_until,
)
from tests.shared.test_credits import text
from tests.shared.test_queues import audio
from tests.support.children import Child

MIB = 2**20
OFFER = """
import resource, sys
import zmq
from omnirelay.errors import QueueFullError
from shared.messages import AudioChunk
from shared.messages.payloads import Blob
from shared.transport.queues import PushQueue, Sending

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

context = zmq.Context()
queue = PushQueue(context, sys.argv[1], Sending("thinker.test", 8 * 2**20, 4 * 2**20))
sys.stdin.readline()
before, refused = peak(), 0
for seq in range(1024):
    try:
        data = bytes([seq % 255 + 1]) * 2**20
        queue.put(AudioChunk(request_id="a", seq=seq, samples=2**18, data=Blob(data)))
    except QueueFullError:
        refused += 1
print(peak() - before, refused, flush=True)
context.destroy(linger=0)
"""
"""Offers 1 GiB, and says by how much its memory grew and how much was refused."""


def return_credit(queue: PullQueue[Any], sender: PushQueue[Any]) -> Callable[[], None]:
    def pass_on() -> None:
        for credit in queue.take_credits():
            sender.credit(credit)
        sender.flush()

    return pass_on


def test_a_gibibyte_for_a_receiver_that_does_not_read_costs_the_sender_its_bounds(context: Context) -> None:
    queue = PullQueue[Any](context, ANY_PORT, StageEvent)
    with Child(
        [sys.executable, "-c", OFFER, endpoint(queue.socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        grown, refused = map(int, process.communicate("go\n", timeout=60)[0].split())
    assert process.returncode == 0
    # 8 MiB on the way, less what the kernel took, 4 that wait, and the one that is being made.
    assert refused >= 1024 - 12
    assert grown < 24 * MIB


def test_the_window_heals_when_the_receiver_dies_with_all_that_was_sent(context: Context) -> None:
    address = free_address()
    dead = PullQueue[Any](context, address, StageEvent)
    sender = PushQueue[Any](context, address, sending(window_bytes=MIB))
    sender.put(text(0))
    take(dead, 1, meanwhile=sender.flush)
    for seq in range(1, 30):
        sender.put(audio(100_000, seq))
    assert sender.stalls("a")
    dead.close()
    successor = bound_at(context, address)
    received: list[int] = []

    def look() -> None:
        received.extend(message.seq for message in successor.drain())
        return_credit(successor, sender)()

    wait_until(lambda: 29 in received, look)
    assert received == list(range(received[0], 30))
    assert sender.backlog_bytes == 0


def hear(harness: Harness) -> Credit:
    """The next credit that a stage gives."""
    while True:
        message = harness.decoder.decode(take_frames(harness.router)[1:])
        if isinstance(message, Credit):
            return message


def test_a_stage_answers_a_mark_when_it_has_taken_what_was_before(context: Context) -> None:
    mark = Mark(sender="thinker.one", channel="0123456789abcdef", position=77)
    with running(context) as harness:
        harness.raw.send_multipart(encode(CodecTokens(request_id="a", seq=0, token_ids=[])))
        # What is refused has been taken, too.
        harness.raw.send_multipart([b"spam"])
        harness.raw.send_multipart(encode(mark))
        credit = hear(harness)
        assert (credit.sender, credit.channel, credit.position) == (mark.sender, mark.channel, mark.position)
        assert harness.inbox.received.messages == 3
        assert harness.inbox.refused.total() == 1


def test_a_stage_without_credit_waits_without_turning_and_goes_on_with_it(context: Context) -> None:
    with running(context, window_bytes=2000) as harness:
        events = harness.events
        assert events is not None
        for seq in range(100):
            harness.send("a", seq, tokens=100)
        # Not only because there is no connection yet.
        wait_until(lambda: harness.gateway.backlog_bytes > 0 and harness.gateway.outstanding_bytes > 0)
        # Said when the loop has come round: not in the middle of sending.
        harness.next_heartbeat()
        steps, rounds = harness.service.steps, harness.loop.rounds
        assert steps < 100
        for _ in range(10):
            harness.next_heartbeat()
        # A few for each heartbeat, and not as many as a processor can.
        assert harness.loop.rounds - rounds < 200
        assert harness.service.steps == steps
        assert harness.gateway.outstanding_bytes <= 2000
        heard: list[int] = []

        def look() -> None:
            heard.extend(event.seq for event in events.drain())
            for credit in events.take_credits():
                harness.router.send_multipart([STAGE.encode(), *encode(credit)])

        wait_until(lambda: len(heard) == 100, look)
        assert heard == list(range(100))


def test_credit_that_cannot_be_is_refused_and_what_is_unknown_is_passed_over(context: Context) -> None:
    with running(context) as harness:
        harness.send("a", 0)
        harness.take(1)
        channel = harness.gateway._window.channel
        for name, position in ((channel, 10**9), ("f" * 16, 10**9), (channel, 0)):
            credit = Credit(sender="token2wav.one", channel=name, position=position)
            harness.router.send_multipart([STAGE.encode(), *encode(credit)])
        wait_until(lambda: harness.next_heartbeat().load.refused == 1)
        assert harness.gateway.outstanding_bytes > 0
        harness.send("a", 1)
        assert [event.seq for event in harness.take(1)] == [1]

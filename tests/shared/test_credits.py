"""Credits: a sender's account, whatever is lost on the way; over real sockets: memory, restarts, a stage."""

import subprocess
import sys
from collections import deque
from typing import Any, cast

import msgspec
import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omnirelay.errors import MessageError
from shared.messages import CodecTokens, Credit, Mark, StageEvent, TextDelta
from shared.transport.credits import MARK_AGAIN_S, Window
from shared.transport.queues import PullQueue, PushQueue
from shared.transport.wire import Decoder, Frame, encode
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
from tests.shared.test_queues import audio
from tests.support.children import Child

WINDOW = 1000
ROUNDS = 20
"""More than any state needs to come to rest."""


def text(seq: int, tokens: int = 1, request_id: str = "a") -> TextDelta:
    return TextDelta(request_id=request_id, seq=seq, token_ids=[0] * tokens)


HIGH_WATER = 8
"""Messages that the pipe holds."""


class Pipe:
    """What a PUSH socket has taken and its PULL socket has not given, in the place of ZeroMQ."""

    def __init__(self) -> None:
        self.messages: deque[list[bytes]] = deque()
        self.connected = True
        self._parts: list[bytes] = []

    def socket(self, _: int) -> "Pipe":
        return self

    def set(self, *_: object) -> None:
        pass

    def connect(self, _: str) -> None:
        pass

    def bind(self, _: str) -> None:
        pass

    @property
    def context(self) -> None:
        return None

    def send(self, frame: Frame, flags: int, **_: bool) -> None:
        if not self.connected or (not self._parts and len(self.messages) >= HIGH_WATER):
            raise zmq.Again
        self._parts.append(bytes(frame))
        if not flags & zmq.SNDMORE:
            self.messages.append(self._parts)
            self._parts = []

    def recv_multipart(self, *_: object, **__: bool) -> list[zmq.Frame]:
        if not self.messages:
            raise zmq.Again
        return [zmq.Frame(part) for part in self.messages.popleft()]


class Channel(RuleBasedStateMachine):
    """A queue whose messages, marks and credits may be lost, late or repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pipe = Pipe()
        context = cast("zmq.Context[zmq.Socket[bytes]]", self.pipe)
        self.sender = PushQueue[Any](context, "", sending(window_bytes=WINDOW))
        self.sender._window._clock = lambda: self.now
        self.receiver = PullQueue[Any](context, "", StageEvent)
        self.decoder = Decoder[TextDelta | Mark](TextDelta | Mark)
        self.credits: list[Credit] = []
        self.put: list[tuple[str, int]] = []
        self.gone: list[tuple[str, int]] = []
        self.count = 0
        self.largest = 0

    @rule(tokens=st.integers(1, 3000), request_id=st.sampled_from("ab"))
    def send(self, tokens: int, request_id: str) -> None:
        self.count += 1
        seq = self.count
        self.put.append((request_id, seq))
        self.largest = max(self.largest, self.sender.put(text(seq, tokens, request_id)))

    @rule(limit=st.integers(1, 5))
    def take(self, limit: int) -> None:
        self.gone += [(message.request_id, message.seq) for message in self.receiver.drain(limit)]
        self.credits += self.receiver.take_credits()

    @precondition(lambda self: self.credits)
    @rule(data=st.data(), again=st.booleans())
    def hear(self, data: st.DataObject, again: bool) -> None:
        """A credit arrives: any, and it may come again."""
        index = data.draw(st.integers(0, len(self.credits) - 1))
        credit = self.credits[index] if again else self.credits.pop(index)
        assert self.sender.credit(credit)

    @precondition(lambda self: self.credits)
    @rule()
    def lose_credits(self) -> None:
        self.credits.clear()

    @rule()
    def break_connection(self) -> None:
        """What is on the way is lost, marks among it; perhaps because the receiver has ended."""
        for frames in self.pipe.messages:
            message = self.decoder.decode(frames)
            if not isinstance(message, Mark):
                self.gone.append((message.request_id, message.seq))
        self.pipe.messages.clear()
        self.pipe.connected = False

    @rule()
    def connect(self) -> None:
        self.pipe.connected = True

    @rule(passed=st.floats(0, 2))
    def come_round(self, passed: float) -> None:
        self.now += passed
        self.sender.flush()

    @rule(request_id=st.sampled_from("ab"))
    def abort(self, request_id: str) -> None:
        self.sender.discard(request_id)
        reached = self.on_the_way() | set(self.gone)
        self.put = [each for each in self.put if each in reached or each[0] != request_id]

    @rule(position=st.integers(1, 10**6))
    def hear_nonsense(self, position: int) -> None:
        window = self.sender._window
        nonsense = Credit(sender="thinker.test", channel=window.channel, position=window.sent + position)
        with pytest.raises(MessageError, match="credit for"):
            self.sender.credit(nonsense)
        assert not self.sender.credit(msgspec.structs.replace(nonsense, channel="0" * 16))

    @invariant()
    def no_more_is_on_the_way_than_the_window_or_one_message(self) -> None:
        sizes = [sum(map(len, frames)) for frames in self.pipe.messages if not self.is_mark(frames)]
        assert sum(sizes) <= self.sender.outstanding_bytes
        assert 0 <= self.sender.outstanding_bytes <= max(WINDOW, self.largest)
        assert sum(sizes) <= WINDOW or len(sizes) == 1

    @invariant()
    def the_socket_is_watched_only_for_what_waits(self) -> None:
        """One that can be written to wakes its loop, which must then have something to write."""
        assert not self.sender.refusing or self.sender.backlog_bytes > 0

    def on_the_way(self) -> set[tuple[str, int]]:
        messages = [self.decoder.decode(frames) for frames in self.pipe.messages]
        return {(each.request_id, each.seq) for each in messages if not isinstance(each, Mark)}

    def is_mark(self, frames: list[bytes]) -> bool:
        return isinstance(self.decoder.decode(frames), Mark)

    def teardown(self) -> None:
        """From any state: once all works again, all is delivered, in order."""
        self.pipe.connected = True
        for _ in range(ROUNDS + len(self.put)):
            self.come_round(2 * MARK_AGAIN_S)
            self.take(1000)
            while self.credits:
                assert self.sender.credit(self.credits.pop(0))
        assert self.sender.backlog_bytes == 0
        assert not self.sender.stalls("a")
        assert self.gone == self.put
        assert not self.receiver.refused


Channel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestChannel = Channel.TestCase


def test_a_mark_goes_out_with_each_quarter_and_when_something_waits() -> None:
    now = 0.0
    window = Window(WINDOW, lambda: now)
    window.add(249)
    assert not window.wants_mark(stalled=False)
    window.add(1)
    assert window.wants_mark(stalled=False)
    window.marked()
    assert not window.wants_mark(stalled=False)
    # All that was sent was asked about; again only if the answer stays away.
    assert not window.wants_mark(stalled=True)
    now += MARK_AGAIN_S
    assert window.wants_mark(stalled=True)
    assert not window.wants_mark(stalled=False)


def test_credit_never_goes_back() -> None:
    window = Window(WINDOW)
    window.add(900)
    window.credit(700)
    window.credit(300)
    assert window.outstanding == 200
    assert window.admits(800)
    assert not window.admits(801)
    window.credit(900)
    assert window.admits(10 * WINDOW)
    with pytest.raises(MessageError, match="credit for 901 bytes of a channel on which 900 were sent"):
        window.credit(901)
    assert window.outstanding == 0


def test_each_channel_has_a_name_of_its_own() -> None:
    assert len({Window(WINDOW).channel for _ in range(100)}) == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sender", "thinker.one.heartbeat"),
        ("sender", "nobody.one"),
        ("sender", "gateway."),
        ("sender", "thinker.one\n"),
        ("channel", "0" * 15),
        ("channel", "0" * 15 + "X"),
        ("position", -1),
        ("position", 2**63),
    ],
)
def test_a_mark_that_cannot_be_is_refused(field: str, value: object) -> None:
    mark = Mark(sender="thinker.one", channel="0" * 16, position=0)
    changed = msgspec.structs.replace(mark, **{field: value})
    decoder = Decoder[Mark | Credit](Mark | Credit)
    assert decoder.decode(encode(mark)) == mark
    with pytest.raises(MessageError):
        decoder.decode(encode(changed))


def test_a_mark_that_is_refused_is_nothing_to_wait_for() -> None:
    """A socket that can be written to would wake the loop over and over, which has nothing to write."""
    pipe = Pipe()
    context = cast("zmq.Context[zmq.Socket[bytes]]", pipe)
    quarter = HIGH_WATER * sum(map(len, encode(text(0))))
    sender = PushQueue[Any](context, "", sending(window_bytes=4 * quarter))
    for seq in range(HIGH_WATER):
        sender.put(text(seq))
    assert sender._window.wants_mark(stalled=False)
    assert (len(pipe.messages), sender.backlog_bytes, sender.refusing) == (HIGH_WATER, 0, [])
    # The next message asks again.
    pipe.messages.clear()
    sender.put(text(HIGH_WATER))
    assert not sender._window.wants_mark(stalled=False)


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
        for credit in successor.take_credits():
            sender.credit(credit)
        sender.flush()

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
        wait_until(lambda: harness.next_heartbeat().load.steps == harness.service.steps)
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

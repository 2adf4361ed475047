"""The queues to the replicas of the next stage."""

import pytest
import zmq

from omnirelay.errors import QueueFullError, StageUnavailableError
from shared.messages import (
    CodecTokens,
    ResumedSpeech,
    Route,
    Sampling,
    SpeechSettings,
    SpeechStart,
    SynthesisStart,
    Token2WavInput,
)
from shared.transport.queues import PullQueue
from shared.transport.routing import PeerQueues
from tests.shared.support import ANY_PORT, Context, free_address, sending, take, wait_until

SPEECH = SpeechSettings(speaker="Chelsie", sampling=Sampling(max_tokens=1), seed=0)


def start(name: str, replica: str | None) -> SynthesisStart:
    route = Route(thinker="a", talker="b", token2wav=replica)
    return SynthesisStart(request_id=name, priority=0, speech=SPEECH, route=route)


def tokens(name: str, seq: int = 0, last: bool = False) -> CodecTokens:
    return CodecTokens(request_id=name, seq=seq, token_ids=[1], last=last)


@pytest.fixture
def inboxes(context: Context) -> dict[str, PullQueue[Token2WavInput]]:
    return {name: PullQueue(context, ANY_PORT, Token2WavInput) for name in ("one", "two")}


@pytest.fixture
def queues(context: Context, inboxes: dict[str, PullQueue[Token2WavInput]]) -> PeerQueues[Token2WavInput]:
    queues: PeerQueues[Token2WavInput] = PeerQueues(context, "token2wav", sending(max_backlog_bytes=2000))
    assert queues.reach({name: inbox.endpoint for name, inbox in inboxes.items()})
    return queues


def test_who_is_not_connected_cannot_be_sent_to_and_breaks_are_counted(queues):
    assert (sorted(queues.names), queues.breaks) == (["one", "two"], {})
    queues._queues["two"].link.take(zmq.EVENT_DISCONNECTED)
    assert (queues.names, queues.breaks) == (["one"], {"two": 1})
    queues._queues["two"].link.take(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    assert (sorted(queues.names), queues.breaks) == (["one", "two"], {"two": 1})


def test_a_request_goes_where_its_route_says_and_what_follows_goes_after_it(queues, inboxes):
    for name, replica in (("a", "one"), ("b", "two"), ("c", "one")):
        queues.put(start(name, replica))
    for name in "abc":
        queues.put(tokens(name))
        queues.put(tokens(name, 1, last=True))
    wait_until(lambda: queues.backlog_bytes == 0, queues.flush)
    heard = {replica: take(inbox, 6 if replica == "one" else 3) for replica, inbox in inboxes.items()}
    assert {message.request_id for message in heard["one"]} == {"a", "c"}
    assert {message.request_id for message in heard["two"]} == {"b"}
    assert queues.sent.messages == 9
    # The last has passed, so nothing of the requests is kept.
    assert queues.put(tokens("a", 2)) == 0
    assert queues._of_request == {}


@pytest.mark.parametrize("replica", ["three", None])
def test_a_replica_that_is_not_known_is_refused(queues, replica):
    with pytest.raises(StageUnavailableError, match="token2wav"):
        queues.put(start("a", replica))
    with pytest.raises(StageUnavailableError):
        queues.put(SynthesisStart(request_id="a", priority=0, speech=SPEECH))


def test_what_waits_for_a_replica_that_is_gone_is_dropped(context, queues, inboxes):
    replicas = {name: inbox.endpoint for name, inbox in inboxes.items()}
    absent = free_address()
    assert queues.reach(replicas | {"three": absent})
    assert not queues.reach(replicas | {"three": absent})
    queues.put(start("a", "three"))
    queues.put(tokens("a"))
    queues.put(start("b", "one"))
    assert queues.backlog_bytes > 0
    assert queues.names == ["one", "two", "three"]
    busy_s = queues.busy_s
    assert queues.reach(replicas)
    assert queues.busy_s >= busy_s
    assert queues.put(tokens("a", 1)) == 0
    assert queues.put(tokens("b")) > 0
    wait_until(lambda: queues.backlog_bytes == 0, queues.flush)
    # Another process at its address gets nothing of that.
    successor: PullQueue[Token2WavInput] = PullQueue(context, absent, Token2WavInput)
    assert queues.reach(replicas | {"four": absent})
    queues.put(start("c", "four"))
    wait_until(lambda: queues.backlog_bytes == 0, queues.flush)
    (first,) = take(successor, 1)
    assert first.request_id == "c"


def test_the_bound_is_for_each_replica(queues, inboxes):
    replicas = {name: inbox.endpoint for name, inbox in inboxes.items()}
    queues.reach(replicas | {"three": free_address()})
    queues.put(start("a", "three"))

    def fill() -> None:
        for seq in range(1000):
            queues.put(tokens("a", seq))

    with pytest.raises(QueueFullError):
        fill()
    assert queues.stalls("a")
    queues.put(start("b", "one"))
    queues.discard("a")
    wait_until(lambda: queues.backlog_bytes == 0, queues.flush)
    assert not queues.stalls("b")
    assert queues.put(tokens("a", 1000)) == 0
    queues.close()
    assert queues.names == []


def test_an_address_that_cannot_be_used_is_not_among_the_names(queues, inboxes):
    assert queues.reach({"one": inboxes["one"].endpoint, "odd": "tcp://*:1"})
    assert queues.names == ["one"]


def test_a_replica_for_which_there_is_no_socket_is_not_among_the_names():
    context = Context()
    context.set(zmq.MAX_SOCKETS, 2)
    queues: PeerQueues[Token2WavInput] = PeerQueues(context, "token2wav", sending())
    assert queues.reach({str(port): f"tcp://127.9.9.9:{port}" for port in range(20_000, 20_005)})
    assert len(queues._queues) == 2
    queues.close()
    context.destroy(linger=0)


def test_a_socket_that_could_not_be_opened_is_opened_by_the_next_call():
    context = Context()
    context.set(zmq.MAX_SOCKETS, 1)
    taken = context.socket(zmq.PUSH)
    queues: PeerQueues[Token2WavInput] = PeerQueues(context, "token2wav", sending())
    replicas = {"one": free_address()}
    assert not queues.reach(replicas)
    assert queues.opened == {}
    taken.close()
    # ZeroMQ closes sockets on a thread of its own.
    wait_until(lambda: queues.reach(replicas))
    assert queues.opened == replicas
    queues.close()
    context.destroy(linger=0)


def test_nothing_is_kept_of_speech_that_needs_no_rows(context):
    queues: PeerQueues[SpeechStart] = PeerQueues(context, "talker", sending())
    queues.reach({"one": free_address()})
    spoken = ResumedSpeech(codec_token_ids=[1], finish_reason="stop")
    route = Route(thinker="a", talker="one", token2wav="c")
    for name, resume in (("a", spoken), ("b", ResumedSpeech(codec_token_ids=[1])), ("c", None)):
        queues.put(
            SpeechStart(
                request_id=name, prompt_tokens=1, priority=0, speech=SPEECH, route=route, resume=resume
            )
        )
    assert set(queues._of_request) == {"b", "c"}

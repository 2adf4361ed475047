"""The queues between two processes, over real TCP sockets."""

import logging
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from omnirelay.errors import AddressInUseError, ConfigError, QueueFullError
from shared.messages import AudioChunk, StageEvent, TextDelta
from shared.messages.payloads import Blob
from shared.transport.queues import ZERO_COPY_BYTES, PullQueue, PushQueue
from shared.transport.wire import VERSION_BYTE, WIRE_VERSION, Frame, encode
from tests.shared.support import (
    ANY_PORT,
    DEADLINE_S,
    Context,
    RawPeer,
    bound_at,
    check_passes,
    endpoint,
    free_address,
    port_of,
    read_all,
    sending,
    take,
    wait_until,
)

Pair = tuple[PushQueue[Any], PullQueue[Any]]


@pytest.fixture
def inbox(context: Context) -> PullQueue[Any]:
    return PullQueue(context, ANY_PORT, StageEvent)


@pytest.fixture
def connect(context: Context) -> Callable[..., PushQueue[Any]]:
    def connect(inbox: PullQueue[Any], **options: Any) -> PushQueue[Any]:
        return PushQueue(context, endpoint(inbox.socket), sending(**options))

    return connect


@pytest.fixture
def raw(context: Context, inbox: PullQueue[Any]) -> zmq.Socket[bytes]:
    """A PUSH socket that sends whatever it is given."""
    sender = context.socket(zmq.PUSH)
    sender.connect(endpoint(inbox.socket))
    return sender


def text(seq: int = 0, request_id: str = "a") -> TextDelta:
    return TextDelta(request_id=request_id, seq=seq, token_ids=[seq])


def audio(samples: int, seq: int = 0) -> AudioChunk:
    data = np.arange(samples, dtype=np.float32)
    return AudioChunk(request_id="a", seq=seq, samples=samples, data=Blob(data.data))


def test_messages_arrive_in_order_whatever_their_size(inbox, connect):
    sender = connect(inbox)
    sent = [audio(samples=(seq % 5) * 20_000, seq=seq) if seq % 3 else text(seq) for seq in range(300)]
    for message in sent:
        sender.put(message)
    received = take(inbox, len(sent), meanwhile=sender.flush)
    assert received == sent
    assert sender.backlog_bytes == 0
    assert not inbox.refused


def test_the_backlog_is_bounded_in_bytes_until_the_receiver_is_there(context):
    message, address = audio(1000), free_address()
    size = sum(len(frame) for frame in encode(message))
    sender = PushQueue[Any](context, address, sending(max_backlog_bytes=3 * size))
    for _ in range(3):
        sender.put(message)
    assert sender.backlog_bytes == 3 * size
    with pytest.raises(QueueFullError, match=f"{3 * size} bytes wait for tcp://.*, no room for {size} more"):
        sender.put(message)
    with pytest.raises(QueueFullError):
        sender.put(text(0))
    assert sender.backlog_bytes == 3 * size
    late = PullQueue[Any](context, address, StageEvent)
    assert take(late, 3, meanwhile=sender.flush) == [message] * 3
    check_passes(sender, late, text(2))


def test_a_queue_stalls_while_anything_waits(context):
    address = free_address()
    sender = PushQueue[Any](context, address, sending())
    assert not sender.stalls("a")
    assert sender.refusing == []
    sender.put(text(0))
    assert sender.stalls("a")
    # There is credit enough, but nobody to whom ZeroMQ could give it.
    assert sender.refusing == [sender._socket]
    late = PullQueue[Any](context, address, StageEvent)
    take(late, 1, meanwhile=sender.flush)
    assert not sender.stalls("a")
    assert sender.refusing == []
    assert 0 < sender.stalled_s == sender.stalled_s


def stuck_sender(context: Context, size: int) -> tuple[bytearray, RawPeer, PushQueue[Any]]:
    """Put a blob of this size for a receiver that shakes hands and then reads nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        sender = PushQueue[Any](context, f"tcp://127.0.0.1:{listener.getsockname()[1]}", sending())
        peer = RawPeer(None, b"PULL", accepted=listener.accept()[0])
    data = bytearray(size)
    sender.put(AudioChunk(request_id="a", seq=0, samples=size // 4, data=Blob(data)))
    wait_until(lambda: sender.backlog_bytes == 0, meanwhile=sender.flush)
    return data, peer, sender


def test_a_large_blob_is_sent_from_where_it_lies(context):
    data, peer, _ = stuck_sender(context, 64 * 2**20)
    # A bytearray cannot grow while anything refers to its bytes: here ZeroMQ, which has not copied them.
    with pytest.raises(BufferError):
        data.append(0)
    peer.close()


def test_a_small_blob_is_copied_so_that_its_memory_is_free_at_once(context):
    data, peer, _ = stuck_sender(context, ZERO_COPY_BYTES - 4)
    data.append(0)
    assert len(data) == ZERO_COPY_BYTES - 3
    peer.close()


def test_a_received_blob_is_the_frame_of_the_socket(inbox, connect, monkeypatch):
    buffers = []
    decode = inbox._decoder.decode

    def remember(frames: list[Frame]) -> object:
        buffers.append(frames[1])
        return decode(frames)

    monkeypatch.setattr(inbox._decoder, "decode", remember)
    sender = connect(inbox)
    sender.put(audio(100_000))
    (message,) = take(inbox, 1, meanwhile=sender.flush)
    assert np.shares_memory(np.frombuffer(message.data.view, np.uint8), np.frombuffer(buffers[0], np.uint8))


def test_a_received_blob_outlives_its_queue(inbox, connect):
    sender = connect(inbox)
    sender.put(audio(50_000))
    (message,) = take(inbox, 1, meanwhile=sender.flush)
    sender.close()
    inbox.close()
    assert message == audio(50_000)


def test_closing_delivers_what_was_taken(inbox, connect):
    sender = connect(inbox)
    sender.put(text(0))
    wait_until(lambda: sender.backlog_bytes == 0, meanwhile=sender.flush)
    sender.close()
    assert take(inbox, 1) == [text(0)]


def test_drain_gives_at_most_its_limit_and_does_not_wait(inbox, connect):
    assert list(inbox.drain()) == []
    sender = connect(inbox)
    for seq in range(5):
        sender.put(text(seq))
    received: list[Any] = []
    sizes: list[int] = []

    def drain_two() -> None:
        sender.flush()
        batch = list(inbox.drain(limit=2))
        sizes.append(len(batch))
        received.extend(batch)

    wait_until(lambda: len(received) == 5, drain_two)
    assert max(sizes) <= 2
    assert received == [text(seq) for seq in range(5)]


def test_refused_messages_count_towards_the_limit(inbox, raw):
    """Else a flood of them would keep the stage from its work."""
    for _ in range(4):
        raw.send(b"spam")
    raw.send_multipart(encode(text(0)))
    wait_until(lambda: inbox.refused.total() > 0, lambda: list(inbox.drain(limit=1)))
    assert inbox.refused.total() == 1
    assert take(inbox, 1) == [text(0)]
    assert inbox.refused.total() == 4


def test_malformed_messages_are_counted_by_code_and_logged_and_do_not_stop_valid_ones(inbox, raw, caplog):
    good = [bytes(frame) for frame in encode(audio(4))]
    with caplog.at_level(logging.WARNING, logger="shared.transport.queues"):
        raw.send_multipart([b""])
        raw.send_multipart([bytes([WIRE_VERSION + 1]) + b"spam"])
        raw.send_multipart(good[:1])
        raw.send_multipart([*good, b"extra"])
        raw.send_multipart([VERSION_BYTE + b"spam"])
        raw.send_multipart(good)
        assert take(inbox, 1) == [audio(4)]
    assert inbox.refused == {"message_invalid": 2, "version_unsupported": 1, "payload_invalid": 2}
    assert len(caplog.records) == 5
    assert (
        f"refused a message on {ANY_PORT}: version_unsupported: message of version {WIRE_VERSION + 1}"
        in caplog.text
    )


def test_bytes_that_are_not_zeromq_leave_the_queue_serving(inbox, connect):
    signature = b"\xff" + bytes(8) + b"\x7f"
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(200), b"\xff" * 200, signature + b"\x7f" * 300, b""):
        with socket.create_connection(("127.0.0.1", port_of(endpoint(inbox.socket)))) as connection:
            connection.sendall(data)
    sender = connect(inbox)
    check_passes(sender, inbox, text(0))
    assert not inbox.refused


def test_a_peer_that_breaks_off_in_a_message_harms_nobody(inbox, connect):
    peer = RawPeer(endpoint(inbox.socket), b"PUSH")
    header, blob = encode(audio(1000))
    peer.send(bytes(header), more=True)
    peer.announce(len(blob))
    peer.connection.sendall(bytes(blob[:100]))
    peer.close()
    sender = connect(inbox)
    check_passes(sender, inbox, text(0))
    assert not inbox.refused


@pytest.mark.parametrize("length", [2**24 + 1, 2**40, 2**63 - 1])
def test_a_peer_that_announces_more_than_allowed_is_dropped_and_others_are_served(context, length):
    small = PullQueue[Any](context, ANY_PORT, StageEvent, max_payload_bytes=2**24)
    other = PushQueue[Any](context, endpoint(small.socket), sending())
    peer = RawPeer(endpoint(small.socket), b"PUSH")
    peer.send(VERSION_BYTE + b"header", more=True)
    peer.announce(length)
    assert read_all(peer.connection) == b""
    check_passes(other, small, text(0))
    assert not small.refused
    peer.close()


def test_an_address_in_use_is_an_error_that_names_it_and_leaves_no_socket(context, inbox):
    address = endpoint(inbox.socket)
    with pytest.raises(AddressInUseError, match=f"{address} is in use: is another OmniRelay process"):
        PullQueue(context, address, StageEvent)
    # An open socket would let the context, and so the process, wait for ever at its end.
    assert [made.closed for made in context.made] == [False, True]
    inbox.close()
    assert endpoint(bound_at(context, address).socket) == address


@pytest.mark.parametrize(
    "address", ["tcp://203.0.113.1:5999", "tcp://no-such-interface:5999", "ipc:///no/such/dir/x"]
)
def test_an_address_that_cannot_be_listened_on_is_a_config_error(context, address):
    with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
        PullQueue(context, address, StageEvent)


def test_an_address_that_cannot_be_connected_to_is_a_config_error(context):
    with pytest.raises(ConfigError, match=r"cannot connect to tcp://\*:5999"):
        PushQueue(context, "tcp://*:5999", sending())
    assert [made.closed for made in context.made] == [True]

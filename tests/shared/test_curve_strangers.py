"""CURVE between processes: who must not get in, does not, is told of once, and counted."""

import logging
import socket
from pathlib import Path

import pytest
import zmq

from shared.transport.curve import ConnectionGuard
from shared.transport.wire import VERSION_BYTE, encode
from tests.shared.peers import HELLO, RETRIES, Open, Stranger, attempts, count_of, guard, inbox, outbox
from tests.shared.support import DEADLINE_S, RawPeer, endpoint, port_of, take, wait_until


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "password",
        "wrong server key",
        "unknown key",
        "key of a role that does not send here",
        "public key of another without its secret",
    ],
)
def test_a_stranger_delivers_nothing_is_told_of_once_and_counted_and_members_are_served(
    opened: Open, directory: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, reason = attempts(directory)[kind]
    context = opened("talker")
    queue = inbox(context)
    push = outbox(opened("thinker"), queue, "talker")
    with caplog.at_level(logging.WARNING, logger="shared.transport.curve"), zmq.Context() as outside:
        stranger = Stranger(outside, endpoint(queue.socket), **options)
        for count in range(1, RETRIES + 1):
            wait_until(lambda count=count: count_of(context, reason) >= count)  # type: ignore[misc]
            assert not stranger.delivered()
            push.put(HELLO)
            assert take(queue, 1, meanwhile=push.flush) == [HELLO]
            if count < RETRIES:
                stranger.again()
        reasons = set(guard(context).refused)
        stranger.close()
    # Who does not use CURVE may hang up before it is told that it should.
    assert reasons <= ({reason, "handshake"} if reason == "no_curve" else {reason})
    refusals = [message for message in caplog.messages if "a connection was refused: " in message]
    assert len(refusals) == len(set(refusals)) == len(caplog.messages) <= len(reasons)
    assert not list(queue.drain())


def test_the_log_names_a_stranger_by_key_and_address_and_a_member_by_role(
    opened: Open, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = opened("talker")
    queue = inbox(context)
    known = attempts(directory)
    with caplog.at_level(logging.WARNING, logger="shared.transport.curve"), zmq.Context() as outside:
        for kind in ("unknown key", "key of a role that does not send here"):
            options = known[kind][0]
            named = f"(127.0.0.1, key {options['CURVE_PUBLICKEY'].decode()}, "
            stranger = Stranger(outside, endpoint(queue.socket), **options)
            # Others may come between: a stranger that tries again is closed in its handshake.
            wait_until(lambda named=named: named in caplog.text)  # type: ignore[misc]
            stranger.close()
            assert options["CURVE_SECRETKEY"].decode() not in caplog.text
    first, second = (message for message in caplog.messages if ", key " in message)
    assert f"in no *.key file of {directory}" in first
    assert "the token2wav's, which does not send to the talker" in second


def test_a_peer_that_speaks_an_older_protocol_is_not_let_in(opened: Open) -> None:
    """ZMTP 1 and 2 know no mechanism; nobody may get around keys by speaking them."""
    context = opened("talker")
    queue = inbox(context)
    frame = VERSION_BYTE + encode(HELLO)[0][1:]
    signature = b"\xff" + (1).to_bytes(8, "big") + b"\x7f"
    older = [
        # ZMTP 1.0: an anonymous identity, and a short frame.
        b"\x01\x00" + bytes([len(frame) + 1, 0]) + frame,
        # ZMTP 2.0: signature, revision, socket type PUSH, an empty identity, and a short frame.
        signature + b"\x01\x08" + b"\x00\x00" + bytes([0, len(frame)]) + frame,
        # ZMTP 3.0 that asks for no mechanism, and does not wait for an answer.
        signature + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + bytes([0, len(frame)]) + frame,
    ]
    for data in older:
        with socket.create_connection(("127.0.0.1", port_of(endpoint(queue.socket)))) as connection:
            connection.settimeout(DEADLINE_S)
            connection.sendall(data)
            while connection_answers(connection):
                pass
    push = outbox(opened("thinker"), queue, "talker")
    push.put(HELLO)
    assert take(queue, 1, meanwhile=push.flush) == [HELLO]
    assert not list(queue.drain())
    assert queue.received.messages == 1


def connection_answers(connection: socket.socket) -> bool:
    """Whether something came; False when the other side has hung up."""
    try:
        return connection.recv(4096) != b""
    except ConnectionResetError:
        return False


def test_a_peer_that_says_nothing_keeps_nobody_out(opened: Open) -> None:
    context = opened("talker")
    queue = inbox(context)
    silent = [socket.create_connection(("127.0.0.1", port_of(endpoint(queue.socket)))) for _ in range(50)]
    push = outbox(opened("thinker"), queue, "talker")
    push.put(HELLO)
    assert take(queue, 1, meanwhile=push.flush) == [HELLO]
    for each in silent:
        each.close()
    wait_until(lambda: guard(context).refused["handshake"] >= len(silent))


def test_a_plain_peer_that_does_not_wait_is_hung_up_on(opened: Open) -> None:
    queue = inbox(opened("talker"))
    with (
        socket.create_connection(("127.0.0.1", port_of(endpoint(queue.socket)))) as connection,
        pytest.raises((AssertionError, ConnectionResetError, BrokenPipeError)),
    ):
        RawPeer(None, b"PUSH", connection)


def test_without_an_answer_to_who_may_connect_nobody_does(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq's own default is the opposite: no answer, everybody is welcome."""
    monkeypatch.setattr(ConnectionGuard, "run", lambda self: (self._zap.close(), self._calls.close()))
    monkeypatch.setattr(ConnectionGuard, "_watch", lambda *_: None)
    context = opened("talker")
    guard(context).join()
    queue = inbox(context)
    push = outbox(opened("thinker"), queue, "talker")
    push.put(HELLO)
    monitor = queue.socket.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_SUCCEEDED
    )
    assert monitor.poll(int(DEADLINE_S * 1000))
    event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
    assert event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    assert push.backlog_bytes
    queue.socket.disable_monitor()
    monitor.close()

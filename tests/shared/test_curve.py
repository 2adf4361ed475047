"""CURVE between processes, with real sockets: members pass every edge, strangers none, and nobody hangs."""

import logging
import re
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from omnirelay.errors import ConfigError
from shared.messages import MAX_REPLICAS, STAGES, Abort, AudioChunk, Role, ThinkerInput
from shared.messages.payloads import Blob
from shared.transport.control import MAX_CONTROL_BYTES, ControlClient
from shared.transport.curve import WELCOME, PeerMetrics
from shared.transport.keys import load_keys, make_keys
from shared.transport.queues import PushQueue, Sending
from shared.transport.routing import PeerQueues
from shared.transport.sockets import bind
from shared.transport.wire import encode
from tests.shared.support import (
    ANY_PORT,
    DEADLINE_S,
    HELLO,
    RETRIES,
    Open,
    Stranger,
    attempts,
    check_passes,
    client_options,
    endpoint,
    free_address,
    guard,
    inbox,
    outbox,
    port_of,
    sending,
    take,
    take_frames,
    wait_until,
)
from tests.shared.test_control import heartbeat
from tests.support.children import Log

EDGES: list[tuple[Role, Role]] = [(sender, receiver) for receiver in WELCOME for sender in WELCOME[receiver]]
"""Every way that messages take: who sends, and to whom."""
MARK = b"nobody else may read this"


# --- members ---


@pytest.mark.parametrize(("sender", "receiver"), EDGES)
def test_messages_pass_every_edge(opened: Open, sender: Role, receiver: Role) -> None:
    queue = inbox(opened(receiver))
    push = outbox(opened(sender), queue, receiver)
    large = AudioChunk(request_id="a", seq=1, samples=250_000, data=Blob(b"\1\2\3\4" * 250_000))
    push.put(HELLO)
    push.put(large)
    assert take(queue, 2, meanwhile=push.flush) == [HELLO, large]
    assert not guard(queue.socket.context).refused  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", STAGES)
def test_the_control_socket_carries_both_ways(opened: Open, stage: Role) -> None:
    router = opened("gateway").socket(zmq.ROUTER)
    bind(router, ANY_PORT)
    client = ControlClient(opened(stage), endpoint(router), stage)
    wait_until(lambda: client.send(heartbeat()))
    assert take_frames(router)[0] == stage.encode()
    router.send_multipart([stage.encode(), *encode(Abort(request_id="a"))])
    heard: list[Any] = []
    wait_until(lambda: bool(heard), lambda: heard.extend(client.receive()))
    assert heard == [Abort(request_id="a")]


def test_addresses_on_the_file_system_are_kept_from_strangers_too(opened: Open, tmp_path: Path) -> None:
    queue = inbox(opened("talker"), f"ipc://{tmp_path}/talker")
    push = outbox(opened("thinker"), queue, "talker")
    stranger = outbox(opened("thinker", None), queue)
    stranger.put(HELLO)
    check_passes(push, queue, HELLO)
    wait_until(lambda: bool(guard(queue.socket.context).refused))  # type: ignore[arg-type]
    assert not list(queue.drain())


def test_the_largest_payload_passes_and_a_larger_one_does_not(opened: Open) -> None:
    """Encryption makes frames longer than the limit that ZeroMQ looks at."""
    limit = 2**24
    queue = inbox(opened("talker"), max_payload_bytes=limit)
    push = outbox(opened("thinker"), queue, "talker")
    largest = AudioChunk(request_id="a", seq=0, samples=limit // 4, data=Blob(bytes(limit)))
    check_passes(push, queue, largest)
    push.put(AudioChunk(request_id="a", seq=0, samples=limit // 4 + 1, data=Blob(bytes(limit + 4))))
    check_passes(push, queue, HELLO)
    assert queue.refused == {"payload_invalid": 1}


def test_nobody_else_can_read_along(opened: Open) -> None:
    chunk = AudioChunk(request_id="secret-id", seq=0, samples=100, data=Blob(MARK * 16))
    for keyed in (True, False):
        receiver, sender = (
            opened(role, **({} if keyed else {"keys": None})) for role in ("gateway", "talker")
        )
        queue = inbox(receiver)
        with Wiretap(port_of(endpoint(queue.socket))) as tap:
            push: PushQueue[Any] = PushQueue(sender, tap.address, sending(), server="gateway")
            check_passes(push, queue, chunk)
            assert (MARK in tap.seen, b"secret-id" in tap.seen) == (not keyed, not keyed)
            push.close()
            queue.close()


class Wiretap:
    """Passes the bytes of one connection on, and keeps those that a client sends."""

    def __init__(self, port: int) -> None:
        self.seen = b""
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._pass_on)

    def __enter__(self) -> "Wiretap":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(DEADLINE_S)
        self._listener.close()

    def _pass_on(self) -> None:
        client, _ = self._listener.accept()
        with closing(client), closing(socket.create_connection(("127.0.0.1", self._port))) as server:
            back = threading.Thread(target=copy, args=(server, client))
            back.start()
            while data := client.recv(65536):
                self.seen += data
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)
            back.join(DEADLINE_S)


def copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
    except OSError:
        return


# --- the other direction: a process that connects is careful too ---


def test_nothing_is_told_to_who_listens_without_keys(opened: Open, caplog: Log) -> None:
    queue = inbox(opened("talker", None))
    with caplog.at_level(logging.WARNING, logger="shared.transport.curve"):
        push = outbox(opened("thinker"), queue, "talker")
        push.put(HELLO)
        wait_until(lambda: bool(caplog.records), push.flush)
    assert push.backlog_bytes
    assert not list(queue.drain())
    assert re.search(r"no connection to the talker at tcp://\S+: the handshake failed: has ", caplog.text)


def test_nothing_is_told_to_who_listens_with_another_key(opened: Open, tmp_path: Path, caplog: Log) -> None:
    make_keys(tmp_path / "other", replace=False)
    impostor = inbox(opened("talker", tmp_path / "other"))
    with caplog.at_level(logging.WARNING, logger="shared.transport.curve"):
        push = outbox(opened("thinker"), impostor, "talker")
        push.put(HELLO)
        wait_until(lambda: "no connection" in caplog.text, push.flush)
        wait_until(lambda: guard(impostor.socket.context).refused["wrong_server_key"] > RETRIES)  # type: ignore[arg-type]
    assert push.backlog_bytes
    ours = [message for message in caplog.messages if "no connection to the talker" in message]
    assert len(ours) == 1
    assert "the handshake failed: has the process there security.keys" in ours[0]


def test_a_member_that_is_not_welcome_is_told_so_once(opened: Open, caplog: Log) -> None:
    queue = inbox(opened("token2wav"))
    with caplog.at_level(logging.WARNING, logger="shared.transport.curve"):
        push = outbox(opened("thinker"), queue, "token2wav")
        push.put(HELLO)
        wait_until(lambda: "no connection to the token2wav" in caplog.text, push.flush)
    assert "our key was rejected" in caplog.text
    assert push.backlog_bytes
    assert (push.link.there, push.link.breaks) == (False, 0)


def test_whose_key_must_be_there_has_to_be_said(opened: Open) -> None:
    with pytest.raises(ConfigError, match="no role is given"):
        PushQueue(opened("thinker"), free_address(), sending())


# --- without keys ---


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5999", "tcp://*:5999", "tcp://203.0.113.1:5999"])
def test_a_socket_that_others_can_reach_is_not_made_without_keys(opened: Open, address: str) -> None:
    """Whatever the configuration says: addresses may also come from a process that registers."""
    with pytest.raises(ConfigError, match=r"there are no keys: set security\.keys, or security\."):
        inbox(opened("talker", None), address)
    with pytest.raises(ConfigError, match="there are no keys"):
        PushQueue(opened("thinker", None), address, sending(), server="talker")


def test_it_is_made_on_a_network_that_is_said_to_be_internal(opened: Open) -> None:
    address = f"tcp://*:{port_of(free_address())}"
    queue = inbox(opened("talker", None, internal_network=True), address)
    thinker = opened("thinker", None, internal_network=True)
    push: PushQueue[Any] = PushQueue(thinker, address.replace("*", "127.0.0.1"), sending(), server="talker")
    check_passes(push, queue, HELLO)


# --- connections that end ---


@pytest.mark.parametrize("keyed", [True, False])
def test_a_connection_that_ends_is_counted_and_attempts_are_not(opened: Open, keyed: bool) -> None:
    """What was under way may be lost, and only the sender's end knows that it was."""
    keys: dict[str, Any] = {} if keyed else {"keys": None}
    address = free_address()
    push: PushQueue[Any] = PushQueue(opened("thinker", **keys), address, sending(), server="talker")
    assert (push.link.there, push.link.breaks) == (False, 0)
    for ended in range(3):
        context = opened("talker", **keys)
        queue = inbox(context, address)
        wait_until(lambda: push.link.there)
        assert push.link.breaks == ended
        check_passes(push, queue, HELLO)
        queue.close()
        context.term()
        wait_until(lambda: not push.link.there)
    assert push.link.breaks == 3


# --- housekeeping ---


def test_a_socket_that_is_closed_leaves_nothing_behind(opened: Open) -> None:
    """Queues to replicas come and go as long as a process lives."""
    context = opened("thinker")
    watched = guard(context)._watched
    for _ in range(20):
        PushQueue[Any](context, free_address(), sending(), server="talker").close()
    wait_until(lambda: not watched and not guard(context)._arrivals)


def test_a_context_ends_at_once_with_strangers_at_the_door(opened: Open, directory: Path) -> None:
    context = opened("talker")
    queue = inbox(context)
    with zmq.Context() as outside:
        stranger = Stranger(outside, endpoint(queue.socket), **attempts(directory)["wrong server key"][0])
        wait_until(lambda: bool(guard(context).refused))
        queue.close()
        started = time.monotonic()
        context.term()
        assert time.monotonic() - started < 30
        stranger.close()
    assert not guard(context).is_alive()


def test_only_so_many_refusals_are_logged(opened: Open, caplog: Log) -> None:
    """Keys cost a stranger nothing: each attempt may bring a new one."""
    context = opened("talker")
    queue = inbox(context)
    server = load_keys(Path(guard(context)._directory), "talker").public["talker"]
    with caplog.at_level(logging.WARNING, logger="shared.transport.curve"), zmq.Context() as outside:
        all_of_them = [
            Stranger(outside, endpoint(queue.socket), **client_options(server, zmq.curve_keypair()))
            for _ in range(80)
        ]
        # Each may try more than once.
        wait_until(lambda: guard(context).refused["unknown_key"] >= 80 and len(caplog.records) >= 64)
        for each in all_of_them:
            each.close()
    assert len(caplog.records) == 64
    assert len(guard(context)._told) == 64


def test_refused_peers_are_a_metric_that_is_there_from_the_start(opened: Open) -> None:
    context = opened("talker")
    (family,) = PeerMetrics(context).collect()
    assert {sample.labels["reason"]: sample.value for sample in family.samples} == {
        "no_curve": 0,
        "wrong_server_key": 0,
        "unknown_key": 0,
        "handshake": 0,
    }
    queue = inbox(context)
    with zmq.Context() as outside:
        stranger = Stranger(outside, endpoint(queue.socket))
        wait_until(lambda: bool(guard(context).refused))
        stranger.close()
    (family,) = PeerMetrics(context).collect()
    told = [sample for sample in family.samples if sample.value]
    assert {(sample.name, sample.labels["stage"]) for sample in told} == {
        ("omnirelay_peers_refused_total", "talker")
    }
    (family,) = PeerMetrics(opened("gateway", None)).collect()
    assert not [sample for sample in family.samples if sample.value]


def test_the_limit_of_a_control_message_is_kept(opened: Open) -> None:
    router = opened("gateway").socket(zmq.ROUTER)
    router.set(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
    bind(router, ANY_PORT)
    assert MAX_CONTROL_BYTES < int(router.get(zmq.MAXMSGSIZE)) < MAX_CONTROL_BYTES + 100


def test_a_process_can_be_connected_to_as_many_replicas_as_there_may_be(opened: Open) -> None:
    """Each connection needs several of ZeroMQ's sockets, of which it allows 1023 by default."""
    queues: PeerQueues[ThinkerInput] = PeerQueues(opened("gateway"), "thinker", Sending("gateway.a"))
    ports = range(20_000, 20_000 + MAX_REPLICAS)
    assert queues.reach({f"replica{port}": f"tcp://127.9.9.9:{port}" for port in ports})
    assert len(queues._queues) == MAX_REPLICAS
    queues.close()

"""Real sockets for the tests: addresses, waiting with a deadline, peers that misbehave, and strangers."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from omnirelay.errors import AddressInUseError
from shared.messages import Role, StageEvent, TextDelta
from shared.messages.payloads import DEFAULT_MAX_PAYLOAD_BYTES
from shared.transport.curve import ConnectionGuard, StackContext
from shared.transport.keys import Keys, load_keys
from shared.transport.queues import PullQueue, PushQueue, Sending
from tests.support.ports import free_ports

DEADLINE_S = 60.0
ANY_PORT = "tcp://127.0.0.1:*"


def sending(**bounds: int) -> Sending:
    """Some sender, within the default bounds unless told otherwise."""
    return Sending("thinker.test", **bounds)


class Context(zmq.Context[zmq.Socket[bytes]]):
    """A context that keeps its sockets, so that it can close those that a test leaves open."""

    made: list[zmq.Socket[bytes]]

    def __init__(self) -> None:
        super().__init__()
        self.made = []

    def socket(self, *arguments: Any, **options: Any) -> zmq.Socket[bytes]:
        made = super().socket(*arguments, **options)
        self.made.append(made)
        return made


def endpoint(bound: zmq.Socket[Any]) -> str:
    """The address of a socket that was bound to :data:`ANY_PORT`."""
    return bound.get_string(zmq.LAST_ENDPOINT)


def free_address() -> str:
    """An address that nobody listens on yet."""
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def wait_until(condition: Callable[[], bool], meanwhile: Callable[[], object] | None = None) -> None:
    """Wait until something is so, and fail if it is not in time.

    Args:
        condition: What to wait for.
        meanwhile: Called before each look at it.
    """
    deadline = time.monotonic() + DEADLINE_S
    while True:
        if meanwhile is not None:
            meanwhile()
        if condition():
            return
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def bound_at(context: Context, address: str) -> PullQueue[Any]:
    """A queue of events at an address that its last owner is just giving up."""
    bound: list[PullQueue[Any]] = []

    def attempt() -> None:
        with suppress(AddressInUseError):
            bound.append(PullQueue(context, address, StageEvent))

    wait_until(lambda: bool(bound), attempt)
    return bound[0]


def take(queue: PullQueue[Any], count: int, meanwhile: Callable[[], object] | None = None) -> list[Any]:
    """Wait for exactly this many messages."""
    messages: list[Any] = []

    def look() -> None:
        if meanwhile is not None:
            meanwhile()
        messages.extend(queue.drain())

    wait_until(lambda: len(messages) >= count, look)
    assert len(messages) == count
    return messages


def check_passes(sender: PushQueue[Any], receiver: PullQueue[Any], message: Any) -> None:
    """Send a message, and wait for it alone."""
    sender.put(message)
    assert take(receiver, 1, meanwhile=sender.flush) == [message]


def take_frames(receiver: zmq.Socket[bytes]) -> list[bytes]:
    """Wait for a multipart message."""
    assert receiver.poll(int(DEADLINE_S * 1000)), "nothing came in time"
    return receiver.recv_multipart()


def read_all(connection: socket.socket) -> bytes:
    """What comes until the other side hangs up."""
    received = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


class RawPeer:
    """A TCP client that speaks just enough ZMTP 3.0 to be taken for a ZeroMQ socket.

    It can say what no ZeroMQ socket would say, and it reads nothing unless it is told to.
    """

    def __init__(self, address: str | None, kind: bytes, accepted: socket.socket | None = None) -> None:
        if accepted is None:
            assert address is not None
            accepted = socket.create_connection(("127.0.0.1", port_of(address)), timeout=DEADLINE_S)
        self.connection = accepted
        self.connection.settimeout(DEADLINE_S)
        greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        self.connection.sendall(greeting)
        self._read(64)
        name = b"Socket-Type"
        properties = bytes([len(name)]) + name + len(kind).to_bytes(4, "big") + kind
        ready = b"\x05READY" + properties
        self.connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
        flags, length = self._read(2)
        assert flags == 0x04
        assert self._read(length).startswith(b"\x05READY")

    def send(self, frame: bytes, more: bool = False) -> None:
        """Send a frame as ZeroMQ would."""
        self.announce(len(frame), more)
        self.connection.sendall(frame)

    def announce(self, length: int, more: bool = False) -> None:
        """Send the beginning of a frame of this length."""
        self.connection.sendall(bytes([0x02 | more]) + length.to_bytes(8, "big"))

    def close(self) -> None:
        self.connection.close()

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.connection.recv(count - len(data))
            assert part, "the other side closed the connection"
            data += part
        return data


HELLO = TextDelta(request_id="a", seq=0, token_ids=[1, 2, 3])
RETRIES = 3
Open = Callable[..., StackContext]
"""Makes the context of a role's process, by default with the keys of the fixture ``directory``."""


def guard(context: StackContext) -> ConnectionGuard:
    return context.guard


def inbox(
    context: StackContext, address: str = ANY_PORT, max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
) -> PullQueue[Any]:
    return PullQueue(context, address, StageEvent, max_payload_bytes)


def outbox(context: StackContext, queue: PullQueue[Any], server: Role | None = None) -> PushQueue[Any]:
    return PushQueue(context, endpoint(queue.socket), sending(), server=server)


class Stranger:
    """A sender that should not get in, over and over with new connections."""

    def __init__(self, context: zmq.Context[Any], address: str, **options: Any) -> None:
        self._make = lambda: self._connected(context, address, options)
        self._sockets = [self._make()]

    def again(self) -> None:
        self._sockets.append(self._make())

    def delivered(self) -> bool:
        """Whether ZeroMQ took a message, which it does only once somebody let it in."""
        return any(each.poll(0, zmq.POLLOUT) for each in self._sockets)

    def close(self) -> None:
        for each in self._sockets:
            each.close(linger=0)

    @staticmethod
    def _connected(context: zmq.Context[Any], address: str, options: dict[str, Any]) -> zmq.Socket[bytes]:
        sender: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        sender.set(zmq.IMMEDIATE, 1)
        for name, value in options.items():
            sender.set(getattr(zmq.SocketOption, name), value)
        sender.connect(address)
        return sender


def client_options(server: bytes, pair: tuple[bytes, bytes]) -> dict[str, bytes]:
    return {"CURVE_SERVERKEY": server, "CURVE_PUBLICKEY": pair[0], "CURVE_SECRETKEY": pair[1]}


def pair_of(keys: Keys) -> tuple[bytes, bytes]:
    return keys.public[keys.role], keys.secret


def attempts(directory: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """What they try, and the reason for which they are refused; all of it at the talker."""
    talker = load_keys(directory, "talker").public["talker"]
    thinker, vocoder = (load_keys(directory, role) for role in ("thinker", "token2wav"))
    drawn = zmq.curve_keypair()
    mixed = (thinker.public["thinker"], drawn[1])
    return {
        "plain": ({}, "no_curve"),
        "password": ({"PLAIN_USERNAME": b"thinker", "PLAIN_PASSWORD": b"secret"}, "no_curve"),
        "wrong server key": (client_options(zmq.curve_keypair()[0], pair_of(thinker)), "wrong_server_key"),
        "unknown key": (client_options(talker, drawn), "unknown_key"),
        "key of a role that does not send here": (client_options(talker, pair_of(vocoder)), "unknown_key"),
        "public key of another without its secret": (client_options(talker, mixed), "wrong_server_key"),
    }


def count_of(context: StackContext, reason: str) -> int:
    counts = guard(context).refused
    return counts[reason] + (counts["handshake"] if reason == "no_curve" else 0)

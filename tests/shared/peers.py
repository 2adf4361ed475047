"""Processes with keys and without, and strangers who knock at their sockets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from shared.messages import Role, StageEvent, TextDelta
from shared.messages.payloads import DEFAULT_MAX_PAYLOAD_BYTES
from shared.transport.curve import ConnectionGuard, StackContext
from shared.transport.keys import Keys, load_keys
from shared.transport.queues import PullQueue, PushQueue
from tests.shared.support import ANY_PORT, endpoint, sending

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

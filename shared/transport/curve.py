"""Who may join: CURVE on the sockets between the processes; and which of their connections end.

The keys belong to a process's ZeroMQ context, as libzmq's question does who may connect (ZAP, RFC 27): it
asks over ``inproc``, once for each connection, before a message is taken.  A thread of the context answers,
so that a long step keeps nobody out.  See docs/adr/0019.
"""

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import zmq
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from omnirelay.errors import ConfigError, MessageError
from shared.config import Config
from shared.config.values import is_local
from shared.messages import STAGES
from shared.metrics import by_reason, counter
from shared.real_time import set_realtime_priority_of
from shared.transport.keys import Keys, Role, load_keys, public_file

WELCOME: Final[dict[Role, tuple[Role, ...]]] = {
    "gateway": STAGES,
    "thinker": ("gateway",),
    "talker": ("thinker",),
    "token2wav": ("talker",),
}
"""Who may connect to a process: those that send to it."""

ENVELOPE_BYTES: Final = 64
"""More than CURVE adds to a frame, which ZeroMQ counts when it looks at the size: 33 in libzmq 4.3."""

KEY_BYTES: Final = 32
"""Of a public key, as ZAP tells it."""

_ZAP: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"omnirelay"
_CALLS: Final = "inproc://omnirelay.curve"
_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_CHANGES: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_REASONS: Final = {
    "no_curve": "the peer does not use CURVE",
    "wrong_server_key": "the peer holds another key for this process",
    "unknown_key": "the peer's key is not welcome here",
    "handshake": "the peer hung up in the handshake, as some without CURVE do",
}
"""Why a peer is not let in, for the metric and for the log."""
_MAX_TOLD: Final = 64
"""Different refusals that are logged; more are only counted."""
log = logging.getLogger(__name__)


class StackContext(zmq.Context[zmq.Socket[bytes]]):
    """The ZeroMQ context of one process of the stack; made by :func:`open_context`.

    Attributes:
        role: Whose process it is.
        internal_network: Addresses of other machines may be used without keys.
        guard: Asks peers for their keys, and watches connections.
    """

    role: Role
    internal_network: bool
    guard: "ConnectionGuard"

    def term(self) -> None:
        """See :meth:`zmq.Context.term`; the guard ends by itself.

        It waits until every socket is closed: other threads' sockets by these.
        """
        super().term()
        self.guard.join()


class Link:
    """The connection of a socket to the process that it sends to.

    Attributes:
        there: It is made; of a socket that nobody watches, always.
        breaks: How often it has ended.  Each time, what was under way may be lost.
    """

    def __init__(self, there: bool = True) -> None:
        self.there = there
        self.breaks = 0

    def take(self, event: int) -> None:
        """Hear of a change from the socket's monitor."""
        if event == zmq.EVENT_DISCONNECTED:
            # Of attempts that fail nothing is lost.
            self.breaks += self.there
        self.there = event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def open_context(config: Config, role: Role) -> StackContext:
    """Make the context of a process.

    Args:
        config: Where its keys are.
        role: Whose process it is.

    Raises:
        ConfigError: The keys cannot be used, or others may read them.
    """
    directory = config.security.keys
    keys = load_keys(Path(directory), role) if directory is not None else None
    context = StackContext()
    set_realtime_priority_of(context)
    context.role = role
    context.internal_network = config.security.internal_network
    context.guard = ConnectionGuard(context, keys, Path(directory or ""))
    return context


def guard_server(socket: zmq.Socket[Any], address: str) -> None:
    """Let a socket that is about to be bound take none but the peers that are welcome.

    Contexts that were not made by :func:`open_context` have no keys and no rules.

    Raises:
        ConfigError: There are no keys, and others can reach the address.
    """
    context = socket.context
    if isinstance(context, StackContext):
        if has_keys(context):
            context.guard.serve(socket, address)
        else:
            _refuse_open_network(context, address)


def guard_client(socket: zmq.Socket[Any], address: str, server: Role | None) -> Link:
    """Let a socket that is about to be connected talk to nobody but the process that is meant.

    Args:
        socket: The socket.
        address: Where it will connect.
        server: Whose process must be there.

    Returns:
        Tells how the connection is.

    Raises:
        ConfigError: There are no keys, and the address is another machine's; or with keys: nobody says whose
            process is meant.
    """
    context = socket.context
    if not isinstance(context, StackContext):
        return Link()
    if not context.guard.has_keys:
        _refuse_open_network(context, address)
    elif server is None:
        raise ConfigError(f"cannot connect to {address}: whose key must be there is not said")
    return context.guard.join_server(socket, address, server)


def has_keys(context: zmq.Context[Any]) -> bool:
    """Whether the processes have keys."""
    return isinstance(context, StackContext) and context.guard.has_keys


def check_key(frame: zmq.Frame, role: Role) -> None:
    """Refuse a message that came with another role's key than that of who it says it is from.

    Args:
        frame: Of the message, received by a socket that :func:`guard_server` prepared.
        role: Who it says it is from.

    Raises:
        MessageError: The key is another role's.
    """
    try:
        # What the guard answered when the peer showed its key: libzmq keeps it, and no peer can set it.
        owner = str(frame.get("User-Id"))
    except zmq.ZMQError as error:
        raise MessageError(f"a message of the {role} came without a key") from error
    if owner != role:
        raise MessageError(f"the {owner}'s key speaks for the {role}")


def _refuse_open_network(context: StackContext, address: str) -> None:
    if not (context.internal_network or is_local(address)):
        raise ConfigError(
            f"{address} is not on this machine alone, and there are no keys: set security.keys, "
            "or security.internal_network: true if nobody else is on that network"
        )


class _Watched(NamedTuple):
    """A socket whose monitor is read: its address, whose process is there if it connects, how that is."""

    address: str
    server: Role | None = None
    link: Link = Link()


class ConnectionGuard(threading.Thread):
    """Prepares the sockets of a context for CURVE, answers libzmq's question who may connect, watches them.

    It ends with its context.

    Args:
        context: The context.
        keys: The process's keys; none asks nobody.
        directory: Where they come from, for what is told.

    Attributes:
        refused: Peers that were not let in, by reason.
    """

    def __init__(self, context: zmq.Context[Any], keys: Keys | None, directory: Path) -> None:
        super().__init__(name="curve", daemon=True)
        self.refused: Counter[str] = Counter()
        self._keys = keys
        self._directory = directory
        self._roles = {z85.decode(key): role for role, key in keys.public.items()} if keys else {}
        self._told: set[tuple[str, str]] = set()
        self._numbers = itertools.count()
        self._arrivals: deque[tuple[zmq.Socket[bytes], _Watched]] = deque()
        self._watched: dict[zmq.Socket[bytes], _Watched] = {}
        # Sockets of a shadow belong to this thread: destroying the context leaves them to it.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._zap = self._context.socket(zmq.REP)
        if keys is not None:
            self._zap.bind(_ZAP)
        self._calls = self._context.socket(zmq.PULL)
        self._calls.bind(_CALLS)
        self.start()

    @property
    def has_keys(self) -> bool:
        """Peers are asked for theirs."""
        return self._keys is not None

    def serve(self, socket: zmq.Socket[Any], address: str) -> None:
        """Prepare a socket that will be bound; there must be keys."""
        self._prepare(socket)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without it, libzmq would let everybody in if nobody answered its question.
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._watch(socket, _FAILURES, _Watched(address))

    def join_server(self, socket: zmq.Socket[Any], address: str, server: Role | None) -> Link:
        """Prepare a socket that will be connected to a role's process."""
        link = Link(there=False)
        if self._keys is None or server is None:
            self._watch(socket, _CHANGES, _Watched(address, None, link))
            return link
        self._prepare(socket)
        socket.set(zmq.CURVE_SERVERKEY, self._keys.public[server])
        self._watch(socket, _CHANGES | _FAILURES, _Watched(address, server, link))
        return link

    def run(self) -> None:
        """Answer until the context ends."""
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._calls, zmq.POLLIN)
        try:
            while True:
                for socket, _ in poller.poll():
                    if socket is self._zap:
                        self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
                    elif socket is self._calls:
                        self._calls.recv()
                        monitor, watched = self._arrivals.popleft()
                        self._watched[monitor] = watched
                        poller.register(monitor, zmq.POLLIN)
                    elif not self._take_event(socket):
                        poller.unregister(socket)
                        del self._watched[socket]
                        socket.close()
        except zmq.ContextTerminated:
            log.debug("the context has ended")
        finally:
            for each in (self._zap, self._calls, *self._watched, *(entry[0] for entry in self._arrivals)):
                each.close(linger=0)

    def _prepare(self, socket: zmq.Socket[Any]) -> None:
        if self._keys is None:
            return
        socket.set(zmq.CURVE_PUBLICKEY, self._keys.public[self._keys.role])
        socket.set(zmq.CURVE_SECRETKEY, self._keys.secret)
        limit = int(socket.get(zmq.MAXMSGSIZE))
        if limit >= 0:
            socket.set(zmq.MAXMSGSIZE, limit + ENVELOPE_BYTES)

    def _watch(self, socket: zmq.Socket[Any], events: int, watched: _Watched) -> None:
        """Hear of a socket's events.  May be called by any thread."""
        name = f"inproc://omnirelay.curve.{next(self._numbers)}"
        socket.monitor(name, events | zmq.EVENT_MONITOR_STOPPED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(name)
        self._arrivals.append((monitor, watched))
        with self._context.socket(zmq.PUSH) as call:
            call.connect(_CALLS)
            call.send(b"")

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Answer libzmq's question: version, number, domain, peer's address, identity, mechanism, key."""
        number = question[1] if len(question) > 1 else b""
        asked = len(question) == 7 and question[2] == _DOMAIN and question[5] == b"CURVE"
        if self._keys and asked and len(question[6]) == KEY_BYTES:
            role = self._roles.get(question[6])
            if role in WELCOME[self._keys.role]:
                return [b"1.0", number, b"200", b"welcome", role.encode(), b""]
            whose = f"the {role}'s, which does not send to the {self._keys.role}"
            key = z85.encode(question[6]).decode()
            what = whose if role is not None else f"in no *.key file of {self._directory}"
            self._refuse("unknown_key", key, f"{question[3].decode('ascii', 'replace')}, key {key}, {what}")
        return [b"1.0", number, b"400", b"not welcome", b"", b""]

    def _take_event(self, monitor: zmq.Socket[bytes]) -> bool:
        """Take what happens to a socket; gives False if it is closed."""
        message = recv_monitor_message(monitor)
        event, value = message["event"], message["value"]
        address, server, link = self._watched[monitor]
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        if event & _CHANGES:
            link.take(event)
        elif server is not None:
            self._tell_client(address, server, event)
        elif event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            # What failed at the key was told and counted when it was asked about.
            self._refuse(
                _reason(value) if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else "handshake", address
            )
        return True

    def _refuse(self, reason: str, about: str, more: str | None = None) -> None:
        self.refused[reason] += 1
        if self._is_news(reason, about):
            log.warning(
                "a connection was refused: %s (%s); more of these are only counted",
                _REASONS[reason],
                more or about,
            )

    def _tell_client(self, address: str, server: Role, event: int) -> None:
        """Tell why this process is not let in, or does not talk to who is there."""
        file = public_file(self._directory, server)
        if self._keys and event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            why = f"our key is not welcome; has it the same {public_file(self._directory, self._keys.role)}?"
        else:
            why = f"the handshake failed: has the process there security.keys, and the pair of {file}?"
        if self._is_news(address, why):
            log.warning("no connection to the %s at %s: %s", server, address, why)

    def _is_news(self, *what: str) -> bool:
        news = what not in self._told and len(self._told) < _MAX_TOLD
        if news:
            self._told.add((what[0], what[1]))
        return news


def _reason(protocol_error: int) -> str:
    if protocol_error == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
        return "no_curve"
    if protocol_error == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
        return "wrong_server_key"
    return "handshake"


class PeerMetrics(Collector):
    """The peers that were not let in, for Prometheus.

    Args:
        context: The process's context.
    """

    def __init__(self, context: StackContext) -> None:
        self._context = context

    def collect(self) -> Iterable[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        guard = self._context.guard
        counts = guard.refused
        yield counter(
            "omnirelay_peers_refused_total",
            "Connections between processes that were refused, by reason.",
            by_reason({"stage": self._context.role}, counts, *_REASONS),
        )

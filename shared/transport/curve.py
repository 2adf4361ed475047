"""CURVE on the sockets between the processes: who may connect, and which connections end.

Keys belong to a process's ZeroMQ context.  libzmq asks over ``inproc`` (ZAP, RFC 27) once per connection,
before it takes a message; a thread of the context answers, even during a long step.  See docs/adr/0019.
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
from shared.messages import MAX_REPLICAS, STAGES, Role
from shared.metrics import by_reason, counter
from shared.real_time import set_realtime_priority_of
from shared.transport.keys import Keys, load_keys, public_file

WELCOME: Final[dict[Role, tuple[Role, ...]]] = {
    "gateway": STAGES,
    "thinker": ("gateway",),
    "talker": ("thinker",),
    "token2wav": ("talker",),
}
"""The roles that may connect to a role: those that send to it."""

ENVELOPE_BYTES: Final = 64
"""More than CURVE adds to a frame (33 in libzmq 4.3), which ZeroMQ counts in its size limit."""

KEY_BYTES: Final = 32
"""Length of a public key in ZAP."""

MAX_SOCKETS: Final = 16 * MAX_REPLICAS
"""More than a process with a connection to each replica of a stage needs; ZeroMQ's default is 1023."""

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
    "unknown_key": "the peer's key is not authorized here",
    "handshake": "the peer closed the connection in the handshake, as some without CURVE do",
}
"""Why a connection is rejected, for the metric and the log."""
_PROTOCOL_ERRORS: Final[dict[int | None, str]] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "no_curve",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "wrong_server_key",
}
_MAX_TOLD: Final = 64
"""Different rejections that are logged; more are only counted."""
log = logging.getLogger(__name__)


class StackContext(zmq.Context[zmq.Socket[bytes]]):
    """The ZeroMQ context of a process, from :func:`open_context`.

    Attributes:
        role: The process's role.
        internal_network: Addresses of other machines may be used without keys.
        guard: Authenticates peers and watches connections.
    """

    role: Role
    internal_network: bool
    guard: "ConnectionGuard"

    def term(self) -> None:
        """See :meth:`zmq.Context.term`: it waits until every socket is closed.  The guard ends by itself."""
        super().term()
        self.guard.join()


class Link:
    """The connection of a socket to its receiver.

    Attributes:
        there: It is connected; always true for a socket that is not watched.
        breaks: How often it was lost, perhaps with data in flight.
    """

    def __init__(self, there: bool = True) -> None:
        self.there = there
        self.breaks = 0

    def take(self, event: int) -> None:
        """Take an event of the socket's monitor."""
        if event == zmq.EVENT_DISCONNECTED:
            # Failed attempts lose nothing.
            self.breaks += self.there
        self.there = event == zmq.EVENT_HANDSHAKE_SUCCEEDED


def open_context(config: Config, role: Role) -> StackContext:
    """Create the context of a process.

    Raises:
        ConfigError: The keys cannot be used, or others may read them.
    """
    directory = config.security.keys
    keys = load_keys(Path(directory), role) if directory is not None else None
    context = StackContext()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    set_realtime_priority_of(context)
    context.role = role
    context.internal_network = config.security.internal_network
    context.guard = ConnectionGuard(context, keys, Path(directory or ""))
    return context


def guard_server(socket: zmq.Socket[Any], address: str) -> None:
    """Let a socket that will be bound accept only the roles that may connect.

    Contexts that are not from :func:`open_context` have no keys and no rules.

    Raises:
        ConfigError: There are no keys, and other machines can reach the address.
    """
    context = socket.context
    if isinstance(context, StackContext):
        if has_keys(context):
            context.guard.serve(socket, address)
        else:
            _refuse_open_network(context, address)


def guard_client(socket: zmq.Socket[Any], address: str, server: Role | None) -> Link:
    """Let a socket that will be connected talk only to the process of the given role.

    Raises:
        ConfigError: There are no keys and the address is another machine's; or there are keys and no role.
    """
    context = socket.context
    if not isinstance(context, StackContext):
        return Link()
    if not context.guard.has_keys:
        _refuse_open_network(context, address)
    elif server is None:
        raise ConfigError(f"cannot connect to {address}: no role is given, so no key can be checked")
    return context.guard.join_server(socket, address, server)


def has_keys(context: zmq.Context[Any]) -> bool:
    """Whether the processes have keys."""
    return isinstance(context, StackContext) and context.guard.has_keys


def check_key(frame: zmq.Frame, role: Role) -> None:
    """Reject a message whose frame came with another key than that of the role it claims.

    The socket must have been prepared by :func:`guard_server`.

    Raises:
        MessageError: The key is another role's.
    """
    try:
        # The guard's answer to the peer's key, kept by libzmq; no peer can set it.
        owner = str(frame.get("User-Id"))
    except zmq.ZMQError as error:
        raise MessageError(f"a message of the {role} came without a key") from error
    if owner != role:
        raise MessageError(f"the {owner}'s key came with a message of the {role}")


def _refuse_open_network(context: StackContext, address: str) -> None:
    if not (context.internal_network or is_local(address)):
        raise ConfigError(
            f"other machines can reach {address}, and there are no keys: set security.keys, "
            "or security.internal_network: true if nobody else is on that network"
        )


class _Watched(NamedTuple):
    """A watched socket: its address, and if it connects, the role and state of its peer."""

    address: str
    server: Role | None = None
    link: Link = Link()


class ConnectionGuard(threading.Thread):
    """Prepares a context's sockets for CURVE, authenticates peers and watches connections.

    Attributes:
        refused: Rejected connections, by reason.
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
        # A shadow's sockets belong to this thread: destroying the context does not close them.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._zap = self._context.socket(zmq.REP)
        if keys is not None:
            self._zap.bind(_ZAP)
        self._calls = self._context.socket(zmq.PULL)
        self._calls.bind(_CALLS)
        self.start()

    @property
    def has_keys(self) -> bool:
        """Whether peers need keys."""
        return self._keys is not None

    def serve(self, socket: zmq.Socket[Any], address: str) -> None:
        """Prepare a socket that will be bound; requires keys."""
        self._prepare(socket)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
        # Otherwise libzmq accepts every peer if nobody answers its ZAP requests.
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
        """Monitor a socket's events; may be called by any thread."""
        name = f"inproc://omnirelay.curve.{next(self._numbers)}"
        socket.monitor(name, events | zmq.EVENT_MONITOR_STOPPED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.connect(name)
        self._arrivals.append((monitor, watched))
        with self._context.socket(zmq.PUSH) as call:
            call.connect(_CALLS)
            call.send(b"")

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Answer a ZAP request: version, id, domain, peer's address, identity, mechanism, key."""
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
        """Take a monitor event; False if the socket was closed."""
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
            # Rejected keys were counted when ZAP asked.
            protocol_error = value if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else None
            self._refuse(_PROTOCOL_ERRORS.get(protocol_error, "handshake"), address)
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
        """Log why a connection of this process was rejected, or its peer not trusted."""
        file = public_file(self._directory, server)
        if self._keys and event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            why = f"our key was rejected; has it the same {public_file(self._directory, self._keys.role)}?"
        else:
            why = f"the handshake failed: has the process there security.keys, and the pair of {file}?"
        if self._is_news(address, why):
            log.warning("no connection to the %s at %s: %s", server, address, why)

    def _is_news(self, *what: str) -> bool:
        news = what not in self._told and len(self._told) < _MAX_TOLD
        if news:
            self._told.add((what[0], what[1]))
        return news


class PeerMetrics(Collector):
    """The rejected connections of a process."""

    def __init__(self, context: StackContext) -> None:
        self._context = context

    def collect(self) -> Iterable[Metric]:
        """See :class:`prometheus_client.registry.Collector`."""
        yield counter(
            "omnirelay_peers_refused_total",
            "Connections between processes refused for their keys, or broken off (`reason`: `handshake`).",
            by_reason({"stage": self._context.role}, self._context.guard.refused, *_REASONS),
        )

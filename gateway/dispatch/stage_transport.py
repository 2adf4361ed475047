"""The gateway's sockets toward the stages, on the asyncio loop."""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Set
from functools import lru_cache
from typing import Final

import msgspec
import zmq

from omnirelay.errors import MessageError, OmniRelayError, VersionError
from omnirelay.protocol import tcp_address
from shared.config import Config
from shared.config.values import WILDCARDS, check_reachable
from shared.log import limited
from shared.messages import (
    HEARTBEAT_SUFFIX,
    ROLES,
    Abort,
    Closing,
    ControlToGateway,
    ControlToStage,
    Credit,
    Heartbeat,
    Mark,
    Role,
    StageEvent,
    StageName,
    ThinkerInput,
    control_identity,
)
from shared.transport.control import MAX_CONTROL_BYTES
from shared.transport.curve import PeerMetrics, check_key, has_keys, open_context
from shared.transport.metrics import EdgeMetrics
from shared.transport.queues import DEFAULT_MAX_BACKLOG_BYTES, PullQueue, Sending
from shared.transport.routing import PeerQueues
from shared.transport.sockets import LINGER_MS, bind
from shared.transport.wire import MAX_HEADER_BYTES, Decoder, encode

CONTROL_BURST: Final = 256
MAX_OTHER_VERSIONS: Final = 1024
"""Processes of other versions that are remembered."""
log = logging.getLogger(__name__)
_checked: Final = lru_cache(maxsize=1024)(check_reachable)


class StageTransport:
    """The sockets; AddressInUseError or ConfigError if an address or the keys cannot be used."""

    def __init__(self, config: Config) -> None:
        gateway = config.gateway
        self._control_refused: Counter[str] = Counter()
        self._decoder: Decoder[ControlToGateway] = Decoder(ControlToGateway, MAX_CONTROL_BYTES)
        self._context = open_context(config, "gateway")
        try:
            self._events: PullQueue[StageEvent] = PullQueue(
                self._context, gateway.events, StageEvent, speaker=_speaker
            )
            self._control = self._context.socket(zmq.ROUTER)
            self._control.set(zmq.LINGER, LINGER_MS)
            # Without it an abort to an unknown stage would be dropped silently.
            self._control.set(zmq.ROUTER_MANDATORY, 1)
            self._control.set(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
            bind(self._control, gateway.control)
        except OmniRelayError:
            self._context.destroy(linger=0)
            raise
        # The largest request must fit, or it would never be sent.
        backlog = max(DEFAULT_MAX_BACKLOG_BYTES, config.media.max_request_bytes + MAX_HEADER_BYTES)
        self._sending = Sending(f"gateway.{secrets.token_hex(8)}", config.window_bytes, backlog)
        self._thinkers: PeerQueues[ThinkerInput] = PeerQueues(self._context, "thinker", self._sending)
        self._of_other_versions: set[bytes] = set()
        # While control messages are read, sends need no other read after them.
        self._reading = False
        self._on_event: Callable[[StageEvent], None] | None = None
        self._on_control: Callable[[ControlToGateway], None] | None = None

    def start(
        self, on_event: Callable[[StageEvent], None], on_control: Callable[[ControlToGateway], None]
    ) -> None:
        """Pass every valid message to a callback, from now on, on the running loop."""
        self._on_event, self._on_control = on_event, on_control
        loop = asyncio.get_running_loop()
        loop.add_reader(self._events.socket, self._read_events)
        loop.add_reader(self._control, self._read_control)
        self.poll()

    def poll(self) -> None:
        """Flush and read, periodically: ZeroMQ's descriptor is edge-triggered, and sends consume edges."""
        self._thinkers.flush()
        self._read_events()
        self._read_control()

    def think(self, request: ThinkerInput) -> None:
        """Send a request, or the beginning of one, to its thinker; QueueFullError if its queue is full."""
        self._thinkers.put(request)

    def tell(self, stage: StageName, replica: str, message: ControlToStage) -> None:
        """Send a control message, if the replica can be reached: what must arrive is repeated."""
        if stage == "thinker" and isinstance(message, Abort):
            self._thinkers.discard(message.request_id)
        self._send(control_identity(stage, replica).encode(), message)

    def reach(self, thinkers: dict[str, str]) -> Set[str]:
        """Keep connections to exactly these thinkers (name to address); return those that answered once."""
        self._thinkers.reach(thinkers)
        return self._thinkers.met

    def breaks(self) -> dict[str, int]:
        """Number of lost connections per thinker; only those with at least one."""
        return self._thinkers.breaks

    def refused(self) -> Counter[str]:
        """Rejected messages by error code."""
        return self._events.refused + self._control_refused

    def collectors(self) -> tuple[EdgeMetrics, PeerMetrics]:
        """Metrics of these sockets' traffic, and of rejected peers."""
        edges = EdgeMetrics("gateway", {"thinker": self._thinkers}, self._events, self._control_refused)
        return edges, PeerMetrics(self._context)

    def close(self) -> None:
        """Close all sockets; pending messages are delivered for at most half a second."""
        if self._context.closed:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._events.socket)
        loop.remove_reader(self._control)
        self._on_event = self._on_control = None
        self._thinkers.close()
        self._events.close()
        self._control.close()
        self._context.term()

    def _send(self, identity: bytes, message: ControlToStage) -> bool:
        sent = True
        try:
            self._control.send_multipart([identity, *encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug(
                "%s did not reach %s: %s", type(message).__name__, identity.decode(errors="replace"), error
            )
            sent = False
        if not self._reading:
            asyncio.get_running_loop().call_soon(self._read_control)
        return sent

    def _read_events(self) -> None:
        if self._on_event is None:
            return
        for event in self._events.drain():
            self._on_event(event)
        for credit in self._events.take_credits():
            self._send(credit.sender.encode(), credit)
        if self._events.socket.poll(0):
            asyncio.get_running_loop().call_soon(self._read_events)

    def _read_control(self) -> None:
        if self._on_control is None:
            return
        # A farewell comes after the last events of its replica.
        self._read_events()
        self._reading = True
        try:
            for _ in range(CONTROL_BURST):
                identity, *frames = self._control.recv_multipart(zmq.NOBLOCK, copy=False)
                try:
                    message = self._decode_control(identity, frames)
                    if isinstance(message, Credit):
                        self._pass_on(message)
                except VersionError as error:
                    self._control_refused[error.code] += 1
                    self._refuse_version(identity.bytes.removesuffix(HEARTBEAT_SUFFIX.encode()), error)
                    continue
                except MessageError as error:
                    self._control_refused[error.code] += 1
                    limited(log).warning("rejected a control message: %s: %s", error.code, error)
                    continue
                if not isinstance(message, Credit):
                    self._on_control(message)
        except zmq.Again:
            return
        finally:
            self._reading = False
        asyncio.get_running_loop().call_soon(self._read_control)

    def _refuse_version(self, process: bytes, error: VersionError) -> None:
        """Log a process of another version once, and answer it once: its own refusal is a line in its log."""
        if process in self._of_other_versions or not self._send(process, Closing()):
            return
        if len(self._of_other_versions) >= MAX_OTHER_VERSIONS:
            self._of_other_versions.clear()
        self._of_other_versions.add(process)
        name = process[:64].decode("ascii", "backslashreplace")
        limited(log).warning("refused the process %r: %s: %s", name, error.code, error)

    def _pass_on(self, credit: Credit) -> None:
        """Give credit to its sender: a stage, or this gateway."""
        if credit.sender != self._sending.sender:
            self._send(credit.sender.encode(), credit)
        elif not self._thinkers.credit(credit):
            log.debug("credit for the channel %s, which was closed", credit.channel)

    def _decode_control(self, identity: zmq.Frame, frames: list[zmq.Frame]) -> ControlToGateway:
        """Decode a message; MessageError if it does not come from the replica it names."""
        message = self._decoder.decode([frame.buffer for frame in frames])
        if isinstance(message, Credit):
            # Channel names are random, so only its peer knows it.
            return message
        speaker = control_identity(message.stage, message.instance)
        if identity.bytes.removesuffix(HEARTBEAT_SUFFIX.encode()) != speaker.encode():
            raise MessageError(f"peer {identity.bytes[:64]!r} speaks for {speaker}")
        if has_keys(self._context):
            check_key(identity, message.stage)
        if isinstance(message, Heartbeat):
            return msgspec.structs.replace(message, inbox=_reachable(message.inbox, identity))
        return message


def _speaker(event: StageEvent | Mark) -> Role:
    """The role whose key an event must come with."""
    if isinstance(event, Mark):
        return next(role for role in ROLES if event.sender.startswith(f"{role}."))
    return event.stage


def _reachable(inbox: str, frame: zmq.Frame) -> str:
    """The address at which the replica is reached whose message tells this inbox; MessageError if by none."""
    host, _, port = inbox.removeprefix("tcp://").rpartition(":")
    try:
        if host in WILDCARDS:
            # A peer without an IP address (ipc) is local.
            inbox = tcp_address(str(frame.get("Peer-Address")) or "127.0.0.1", port)
        return _checked(inbox)
    except (ValueError, zmq.ZMQError) as error:
        raise MessageError(str(error)) from error

"""Typed queues over ZeroMQ: one direction, one union of messages, memory limited in bytes.

The receiver binds, the sender connects.  Small frames are copied into the socket, large ones are not.  ZeroMQ
gets no more than the receiver has :mod:`credit <shared.transport.credits>` for; the rest waits here.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Generic, TypeVar

import zmq

from omnirelay.errors import MessageError, QueueFullError
from shared.log import limited
from shared.messages import Credit, Mark, Role
from shared.messages.payloads import DEFAULT_MAX_PAYLOAD_BYTES, DEFAULT_WINDOW_BYTES
from shared.metrics import WAIT_BUCKETS, Distribution, Traffic
from shared.transport.credits import Window
from shared.transport.curve import check_key, has_keys
from shared.transport.sockets import LINGER_MS, bind, connect
from shared.transport.wire import MAX_HEADER_BYTES, Decoder, Frame, encode

HIGH_WATER_MARK: Final = 4096
"""Messages that ZeroMQ may hold at each end, for messages whose bytes do not matter.  With far fewer, a
receiver in a long step would read nothing from the network and lose its connection."""
ZERO_COPY_BYTES: Final = 64 * 1024
"""Frames of this size are not copied; below it, copying is cheaper than the bookkeeping."""
DEFAULT_MAX_BACKLOG_BYTES: Final = 256 * 2**20

M = TypeVar("M")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sending:
    """The sender, and the limits on what it holds.

    Attributes:
        sender: The process, as in :class:`shared.messages.Mark`.
        window_bytes: Most bytes in flight to one receiver; a larger message goes alone.
        max_backlog_bytes: Most bytes that wait for one receiver after that.
    """

    sender: str
    window_bytes: int = DEFAULT_WINDOW_BYTES
    max_backlog_bytes: int = DEFAULT_MAX_BACKLOG_BYTES


class PushQueue(Generic[M]):
    """The sending end of an edge.

    Attributes:
        sent: What ZeroMQ took.
        waited: Seconds from encoding until then, per message.
        busy_s: Seconds spent encoding and handing over.
        backlog_bytes: Bytes that wait here for the receiver.
        link: State of its connection.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        sending: Sending,
        server: Role | None = None,
    ) -> None:
        self.address = address
        self.sending: Final = sending
        self.sent = Traffic()
        self.waited = Distribution(WAIT_BUCKETS)
        self.busy_s = 0.0
        self._window = Window(sending.window_bytes)
        # Request, frames, size, and since when it waits.
        self._backlog: deque[tuple[str, list[Frame], int, float]] = deque()
        self.backlog_bytes = 0
        self._refused = False
        self._stalled_s = 0.0
        self._stalled_since: float | None = None
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.IMMEDIATE, 1)
        self.link = connect(self._socket, address, server)

    @property
    def outstanding_bytes(self) -> int:
        """Bytes that ZeroMQ took and the receiver has not credited."""
        return self._window.outstanding

    @property
    def stalled_s(self) -> float:
        """Seconds in which something waited here; safe to read from another thread."""
        since = self._stalled_since
        return self._stalled_s + (perf_counter() - since if since is not None else 0.0)

    @property
    def refusing(self) -> list[zmq.Socket[bytes]]:
        """The socket, if ZeroMQ and not the window is full: poll it for writing."""
        return [self._socket] if self._refused and self._backlog else []

    def stalls(self, request_id: str) -> bool:  # noqa: ARG002 - see shared.transport.routing.Outlet
        """Whether the receiver does not keep up, so that no more should be produced for it."""
        return bool(self._backlog)

    def put(self, message: M) -> int:
        """Send a message now, or keep it until :meth:`flush` can; returns its bytes on the wire.

        Raises:
            QueueFullError: The backlog is full; the message was not taken.
        """
        request_id: str = message.request_id  # type: ignore[attr-defined]  # every message has one
        started = perf_counter()
        frames = encode(message)
        encoded = perf_counter()
        self.sent.codec_seconds.observe(encoded - started)
        size = sum(map(len, frames))
        if self.backlog_bytes + size > self.sending.max_backlog_bytes:
            raise QueueFullError(
                f"{self.backlog_bytes} bytes wait for {self.address}, no room for {size} more"
            )
        self._send_backlog()
        if not self._backlog and self._try_send(frames, size):
            # It did not wait; no need to read the clock.
            self.waited.counts[0] += 1
        else:
            self._backlog.append((request_id, frames, size, encoded))
            self.backlog_bytes += size
            if self._stalled_since is None:
                self._stalled_since = encoded
        self._mark()
        self.busy_s += perf_counter() - started
        return size

    def flush(self) -> None:
        """Send the backlog as far as possible; never blocks."""
        if self._backlog:
            started = perf_counter()
            self._send_backlog()
            self._mark()
            self.busy_s += perf_counter() - started

    def credit(self, credit: Credit) -> bool:
        """Take a credit and send more; False if another queue's, :class:`MessageError` if invalid."""
        if credit.channel != self._window.channel:
            return False
        self._window.credit(credit.position)
        self.flush()
        return True

    def discard(self, request_id: str) -> None:
        """Drop a request's messages from the backlog, because it has ended."""
        dropped = sum(size for owner, _, size, _ in self._backlog if owner == request_id)
        if dropped:
            self._backlog = deque(entry for entry in self._backlog if entry[0] != request_id)
            self.backlog_bytes -= dropped
            self._note_end_of_stall()

    def close(self, deliver: bool = True) -> None:
        """Close the socket; with ``deliver``, ZeroMQ may send what it holds for at most :data:`LINGER_MS`."""
        if deliver:
            self.flush()
        self._socket.close(None if deliver else 0)

    def _send_backlog(self) -> None:
        while self._backlog:
            _, frames, size, since = self._backlog[0]
            if not self._try_send(frames, size):
                return
            self._backlog.popleft()
            self.backlog_bytes -= size
            self.waited.observe(perf_counter() - since)
        self._note_end_of_stall()

    def _note_end_of_stall(self) -> None:
        if self._stalled_since is not None and not self._backlog:
            self._stalled_s, self._stalled_since = self.stalled_s, None
            self._refused = False

    def _try_send(self, frames: list[Frame], size: int) -> bool:
        if not self._window.admits(size):
            self._refused = False
            return False
        if not self._hand_over(frames, size):
            return False
        self._window.add(size)
        return True

    def _mark(self) -> None:
        """Ask for credit if it is time."""
        stalled = bool(self._backlog) and not self._window.admits(self._backlog[0][2])
        if self._window.wants_mark(stalled):
            mark = Mark(sender=self.sending.sender, channel=self._window.channel, position=self._window.sent)
            frames = encode(mark)
            if self._hand_over(frames, len(frames[0])):
                self._window.marked()

    def _hand_over(self, frames: list[Frame], size: int) -> bool:
        """Give a message to ZeroMQ; False if ZeroMQ is full."""
        last = len(frames) - 1
        for index, frame in enumerate(frames):
            more = zmq.SNDMORE if index < last else 0
            try:
                self._socket.send(frame, zmq.NOBLOCK | more, copy=len(frame) < ZERO_COPY_BYTES)
            except zmq.Again:
                # Only a first part can be refused: multipart messages are atomic.
                self._refused = True
                return False
        self._refused = False
        self.sent.messages += 1
        self.sent.bytes += size
        return True


class PullQueue(Generic[M]):
    """The receiving end of an edge; invalid messages are rejected, logged and counted.

    Args:
        union: The message types that this edge carries.
        max_payload_bytes: Largest tensor.
        speaker: The role that a message must come from; with keys, a message with another role's key is
            rejected.  Not needed where only one role may connect.

    Attributes:
        received: What arrived.
        refused: Number of rejected messages, by error code.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        union: Any,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
        speaker: Callable[[M | Mark], Role] | None = None,
    ) -> None:
        self.address = address
        self._speaker = speaker if has_keys(context) else None
        self.received = Traffic()
        self.refused: Counter[str] = Counter()
        self._decoder: Decoder[M | Mark] = Decoder(union | Mark, max_payload_bytes)
        # The last mark of each channel.
        self._marks: dict[str, Mark] = {}
        self.socket = context.socket(zmq.PULL)
        self.socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.set(zmq.LINGER, 0)
        # ZeroMQ disconnects a peer that announces more, before it allocates.
        self.socket.set(zmq.MAXMSGSIZE, max(max_payload_bytes, MAX_HEADER_BYTES))
        bind(self.socket, address)

    @property
    def endpoint(self) -> str:
        """The address it listens on, with the actual port for ``*``."""
        return self.socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def drain(self, limit: int = 256) -> Iterator[M]:
        """The messages that have arrived, at most ``limit``; never blocks."""
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            message = self._decode(frames)
            if isinstance(message, Mark):
                self._marks[message.channel] = message
            elif message is not None:
                yield message

    def take_credits(self) -> list[Credit]:
        """Credits for the messages that :meth:`drain` has returned since the last call."""
        marks, self._marks = self._marks, {}
        return [
            Credit(sender=mark.sender, channel=mark.channel, position=mark.position)
            for mark in marks.values()
        ]

    def refuse(self, error: MessageError) -> None:
        """Count and log a message that was rejected, here or by the stage."""
        self.refused[error.code] += 1
        limited(log).warning("refused a message on %s: %s: %s", self.address, error.code, error)

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()

    def _decode(self, parts: list[zmq.Frame]) -> M | Mark | None:
        frames: list[Frame] = [part.buffer for part in parts]
        received = self.received
        received.messages += 1
        received.bytes += sum(map(len, frames))
        started = perf_counter()
        try:
            message = self._decoder.decode(frames)
            if self._speaker is not None:
                check_key(parts[0], self._speaker(message))
        except MessageError as error:
            self.refuse(error)
            return None
        received.codec_seconds.observe(perf_counter() - started)
        return message

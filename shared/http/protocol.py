"""uvicorn's HTTP connections, with limits on idle and slow clients and on those that do not read."""

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.log import limited

MAX_HEAD_BYTES: Final = 32 * 2**10
"""Limit of the request line and headers together."""
HEAD_S: Final = 10.0
"""Time limit of a request's head, from its first byte or from the connection's start."""
KEEP_ALIVE_S: Final = 60
"""Time limit between two requests."""
DRAIN_S: Final = 30.0
"""How long the rest of a body is read after the answer: a client that is still sending would lose it."""
DRAIN_BYTES: Final = 2**28
"""How much of it is read."""
READ_BYTES: Final = 2**14
"""Read of a connection at once: of chunks or frames of one byte the parsers take 3 ms for each 1000 bytes."""
STALL_S: Final = 60.0
"""How long a client may read little while data wait for it."""
STALL_BYTES: Final = 2**18
"""How much is not little."""
PROBE_S: Final = 0.25
"""How often a connection whose client has closed its sending side is checked for a reset."""
PLACE: Final = "place"
"""Key of a connection's state that holds its place."""
HALF_CLOSED: Final = "half_closed"
"""Key of a connection's state that holds an event, set when the client closes its sending side."""
_QUOTED: Final = re.compile(r":? (?:bytearray\()?b['\"].*", re.DOTALL)
"""What h11 quotes of a request, at the end of a message."""
_LINE_ENDS: Final = len(b"  HTTP/1.1\r\n" + b"\r\n")
log = logging.getLogger(__name__)
Malformed = Callable[[str], tuple[str, bytes]]
"""Builds type and body of the response to an invalid request from what is wrong with it."""


class Place(Protocol):
    """One connection's place."""

    def leave(self) -> None:
        """Free it; may be called again."""


class Places(Protocol):
    """The places of a server."""

    def take(self, address: str, hang_up: Callable[[], None], idle: Callable[[], bool]) -> Place | None:
        """Take a place for a connection, which ``hang_up`` closes; none if its address gets no more.

        An ``idle`` connection may be closed for another one.
        """


class SmallReads(asyncio.BufferedProtocol):
    """Takes little at once, with TLS too, so that others are served in between."""

    _read = memoryview(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where data are read to."""
        del sizehint
        self._read = self._read or memoryview(bytearray(READ_BYTES))
        return self._read

    def buffer_updated(self, nbytes: int) -> None:
        """Process what was read."""
        self.data_received(bytes(self._read[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Process data; see :class:`asyncio.Protocol`."""
        raise NotImplementedError


class BoundedProtocol(H11Protocol, SmallReads):
    """One connection; takes one of the places, and uvicorn's arguments."""

    def __init__(self, places: Places, malformed: Malformed, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._malformed = malformed
        self._bounded = self.conn = _BoundedHttp(h11.SERVER, MAX_HEAD_BYTES)
        self._places = places
        self._place: Place | None = None
        self._socket: asyncio.Transport | None = None
        self._lingering = self._upgraded = False
        self._half_closed = asyncio.Event()
        self._drained = 0
        self._head = Alarm(self.loop, HEAD_S, self._hang_up)
        self._drain = Alarm(self.loop, DRAIN_S, self._hang_up)
        self._stall = Alarm(self.loop, STALL_S, self._check_stall)
        self._unread = 0
        self._probe = Alarm(self.loop, PROBE_S, self._check_reset)

    @property
    def answering(self) -> bool:
        """Whether a response is incomplete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection if there is a place for it."""
        self._socket = transport
        super().connection_made(cast("asyncio.Transport", _Lingering(transport, self._linger)))
        address = self.client[0] if self.client is not None else "unknown"
        self._place = self._places.take(
            address, self._hang_up, lambda: not (self.answering or self._upgraded)
        )
        self.app_state = {**self.app_state, PLACE: self._place, HALF_CLOSED: self._half_closed}
        if self._place is None:
            limited(log).warning("connection refused: no place for another one of its address")
            self._hang_up()
        else:
            self._head.start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the place."""
        self._stop_alarms()
        if self._place is not None:
            self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process data, and limit the time for the rest of a head."""
        if self._lingering or self._leaving_a_body:
            self._drained += len(data)
            if self._drained > DRAIN_BYTES:
                self._hang_up()
        if self._lingering:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY:
            self._drain.stop()
            self._drained = 0
        if self.conn.their_state is not h11.IDLE:
            self._head.stop()
        elif not self.transport.is_closing():
            self._head.start()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Finish the answer if the client closed only its sending side after a complete request.

        A client that closed the whole connection looks the same until data are sent to it, which its system
        answers with a reset.  So an interim response is sent, or a comment in an event stream.  With
        asyncio's TLS and with HTTP/1.0 neither is possible, and the client counts as gone.

        Returns:
            Whether the connection stays open.
        """
        complete = self.answering and self.conn.their_state in {h11.DONE, h11.MUST_CLOSE}
        if not complete or self.scheme == "https" or self.conn.their_http_version != b"1.1":
            return False
        if self.conn.our_state is h11.SEND_RESPONSE:
            interim = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(interim))
        self._half_closed.set()
        self._probe.start()
        return True

    def on_response_complete(self) -> None:
        """Go on to the next request, and limit what is read of this one."""
        if self._lingering:
            return
        super().on_response_complete()
        if self._leaving_a_body and not self.transport.is_closing():
            self._drain.start()
        if (
            self.conn.their_state is h11.IDLE
            and self.conn.trailing_data[0]
            and not self.transport.is_closing()
        ):
            # The beginning of another head came with the request.
            self._head.start()
        if self._half_closed.is_set() and not self.answering:
            self.transport.close()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection to the WebSocket protocol."""
        self._stop_alarms()
        self._upgraded = True
        if self._socket is not None:
            self.transport = self._socket
        super().handle_websocket_upgrade(event)

    def pause_writing(self) -> None:
        """Limit the time until the client reads."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._stall.start()

    def resume_writing(self) -> None:
        """Lift that limit."""
        self._stall.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer an invalid request with an error object, unless a response has begun."""
        if self.cycle is not None:
            # The endpoint, if it still runs, is cancelled.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        problem = self._bounded.problem or msg
        limited(log).info("400 %s", problem)
        kind, body = self._malformed(problem)
        headers = [("content-type", kind), ("content-length", str(len(body))), ("connection", "close")]
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        # Responses to HEAD have no body.
        of_head = self.conn.our_state is h11.SEND_RESPONSE and self._bounded.method == b"HEAD"
        for part in (answer, h11.Data(data=b"" if of_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    @property
    def _leaving_a_body(self) -> bool:
        """Whether a request was answered before its body was complete."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.conn.their_state is h11.SEND_BODY

    def _linger(self) -> bool:
        """Close only the sending side if the client is still sending, since it would lose the answer.

        What it sends is read and discarded, within limits.

        Returns:
            Whether the connection stays open.
        """
        theirs = self.conn.their_state
        if self._lingering or self._socket is None or self._socket.is_closing():
            return False
        if theirs is not h11.SEND_BODY and theirs is not h11.ERROR and not self._bounded.problem:
            return False
        self._lingering = True
        self._stop_alarms()
        if self._socket.can_write_eof():
            self._socket.write_eof()
        self.flow.resume_reading()
        self._drain.start()
        return True

    def _check_reset(self) -> None:
        if self._socket is None:
            return
        if self._socket.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._hang_up()
        else:
            self._probe.again()

    def _check_stall(self) -> None:
        """Hang up on a client that has read too little since: a large body may take longer."""
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if before - self._unread < STALL_BYTES:
            self._hang_up()
        else:
            self._stall.again()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.abort()

    def _stop_alarms(self) -> None:
        for alarm in (self._head, self._drain, self._stall, self._probe):
            alarm.stop()


class _BoundedHttp(h11.Connection):
    """HTTP with a limit on heads, however they are split, and without bodies of two lengths.

    Attributes:
        method: The method of the last request.
        problem: Why a request is invalid.
    """

    method = b""
    problem: str | None = None

    def next_event(self) -> Any:
        """Return h11's next event.

        Raises:
            h11.RemoteProtocolError: The request is invalid.
        """
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self.method = event.method
                _check_head(event)
        except h11.RemoteProtocolError as error:
            self.problem = f"invalid HTTP request: {_QUOTED.sub('', str(error))}"
            raise
        return event


def _check_head(request: h11.Request) -> None:
    """Refuse a head that is too long or ambiguous."""
    size = _LINE_ENDS + len(request.method) + len(request.target)
    size += sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers)
    if size > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError(f"its head has {size} bytes, the limit is {MAX_HEAD_BYTES}")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
        raise h11.RemoteProtocolError("it has both a Content-Length and a Transfer-Encoding")


class _Lingering:
    """A transport that closes unless ``linger`` returns true."""

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._linger = linger

    def close(self) -> None:
        """Close it, now or later."""
        if not self._linger():
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Alarm:
    """A timer that can be started and stopped repeatedly."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start it if it is not running."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._ring)

    def again(self) -> None:
        """Start it anew."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Stop it if it is running."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

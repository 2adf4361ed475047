"""uvicorn's connections with bounds on what a client may hold: idle, slow or deaf ones are hung up on."""

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from typing import Any, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.access.places import Place, Places
from gateway.http.errors import malformed
from gateway.http.guards.keys import PLACE
from shared.log import limited

MAX_HEAD_BYTES: Final = 32 * 2**10
"""Request line and headers."""
HEAD_S: Final = 10.0
"""How long the head of a request may take, from its first byte or from the connection's begin."""
KEEP_ALIVE_S: Final = 60
"""How long a connection may wait for its next request."""
DRAIN_S: Final = 30.0
"""How long the rest of a body is read whose request has been answered, so that the answer is heard."""
DRAIN_BYTES: Final = 2**28
"""How much of such a rest is read."""
STALL_S: Final = 60.0
"""How long a client may read nothing of what waits for it."""
PROBE_S: Final = 0.25
"""How often a connection whose client has closed its sending side is checked for a reset."""
HALF_CLOSED: Final = "half_closed"
"""Where the state of a connection holds the event that its client has closed its sending side."""
_QUOTED: Final = re.compile(r":? (?:bytearray\()?b['\"].*", re.DOTALL)
"""Bytes that h11 quotes from a request at the end of a message."""
_LINE_ENDS: Final = len(b"  HTTP/1.1\r\n" + b"\r\n")
log = logging.getLogger(__name__)


class BoundedProtocol(H11Protocol):
    """One connection.

    Args:
        places: Where it has its place, if there is one.
        *args: uvicorn's.
        **kwargs: uvicorn's.
    """

    def __init__(self, places: Places, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounded = self.conn = _BoundedHttp(h11.SERVER, MAX_HEAD_BYTES)
        self._places = places
        self._place: Place | None = None
        self._socket: asyncio.Transport | None = None
        self._lingering = False
        self._half_closed = asyncio.Event()
        self._drained = 0
        self._head = Alarm(self.loop, HEAD_S, self._hang_up)
        self._drain = Alarm(self.loop, DRAIN_S, self._hang_up)
        self._stall = Alarm(self.loop, STALL_S, self._hang_up)
        self._probe = Alarm(self.loop, PROBE_S, self._check_reset)

    @property
    def answering(self) -> bool:
        """A request has begun whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, if there is a place for it."""
        self._socket = transport
        super().connection_made(cast("asyncio.Transport", _Lingering(transport, self._linger)))
        address = self.client[0] if self.client is not None else "unknown"
        self._place = self._places.take(address, self._hang_up)
        self.app_state = {**self.app_state, PLACE: self._place, HALF_CLOSED: self._half_closed}
        if self._place is None:
            self._hang_up()
        else:
            self._place.idle = lambda: not self.answering
            self._head.start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_alarms()
        if self._place is not None:
            self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came; the rest of a head must come soon."""
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

        A client that closed the whole connection looks the same until data is sent to it: its system answers
        those with a reset.  So an interim response is sent, or for a stream of events a comment.  Neither TLS
        in asyncio nor HTTP/1.0 allows this; there the client counts as gone.

        Returns:
            Whether the connection stays.
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
        """Go on to the next request; what is left of this one is not read for ever."""
        if self._lingering:
            return
        super().on_response_complete()
        if self._leaving_a_body and not self.transport.is_closing():
            self._drain.start()
        if self._half_closed.is_set() and not self.answering:
            self.transport.close()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over, and its place."""
        self._stop_alarms()
        if self._place is not None:
            self._place.idle = lambda: False
        if self._socket is not None:
            self.transport = self._socket
        super().handle_websocket_upgrade(event)

    def pause_writing(self) -> None:
        """Wait for the client to read, for some time."""
        super().pause_writing()
        self._stall.start()

    def resume_writing(self) -> None:
        """Go on: the client reads."""
        self._stall.stop()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, in the form of the other errors, if no other answer has begun."""
        if self.cycle is not None:
            # Whoever still answers the request that broke off has nobody to answer to.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        problem = self._bounded.problem or msg
        limited(log).info("400 %s", problem)
        headers, body = malformed(problem)
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        # A HEAD whose body is broken has an answer without one.
        of_head = self.conn.our_state is h11.SEND_RESPONSE and self._bounded.method == b"HEAD"
        for part in (answer, h11.Data(data=b"" if of_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    @property
    def _leaving_a_body(self) -> bool:
        """A request has been answered before all of its body came."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self.conn.their_state is h11.SEND_BODY

    def _linger(self) -> bool:
        """Close the sending side only, if the client is still sending: it would lose the answer.

        What it sends is read and forgotten, within bounds, until it closes its side.

        Returns:
            Whether the connection stays.
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
            self._probe.stop()
            self._probe.start()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.abort()

    def _stop_alarms(self) -> None:
        for alarm in (self._head, self._drain, self._stall, self._probe):
            alarm.stop()


class _BoundedHttp(h11.Connection):
    """HTTP of which no head is too long, however it was cut, and no body has two lengths.

    Attributes:
        method: Of the last request.
        problem: What is wrong with what came.
    """

    method = b""
    problem: str | None = None

    def next_event(self) -> Any:
        """Give what came next, as h11 does.

        Raises:
            h11.RemoteProtocolError: It is not HTTP, or a head that is refused.
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
    """Refuse a head that is too long, or ambiguous.

    Raises:
        h11.RemoteProtocolError: It is.
    """
    size = _LINE_ENDS + len(request.method) + len(request.target)
    size += sum(len(name) + len(value) + len(b": \r\n") for name, value in request.headers)
    if size > MAX_HEAD_BYTES:
        raise h11.RemoteProtocolError(f"its head has {size} bytes, at most {MAX_HEAD_BYTES} are taken")
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in request.headers}:
        raise h11.RemoteProtocolError("it has both a Content-Length and a Transfer-Encoding: send one")


class _Lingering:
    """A transport that is not closed while its client is still sending.

    Args:
        transport: The connection's.
        linger: Asked when it is to be closed; says whether it stays.
    """

    def __init__(self, transport: asyncio.Transport, linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._linger = linger

    def close(self) -> None:
        """Close it, at once or later."""
        if not self._linger():
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Alarm:
    """Calls something unless it is stopped in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start, if it does not run."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._ring)

    def stop(self) -> None:
        """Stop, if it runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

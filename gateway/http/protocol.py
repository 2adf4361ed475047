"""uvicorn's connections with bounds on what a client may hold: idle, slow or deaf ones are hung up on."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.http.errors import malformed

MAX_CONNECTIONS: Final = 512
"""Open at once; one more is closed as it comes."""
MAX_HEAD_BYTES: Final = 32 * 2**10
"""Request line and headers."""
HEAD_S: Final = 10.0
"""How long the head of a request may take, from its first byte or from the connection's begin."""
KEEP_ALIVE_S: Final = 60
"""How long a connection may wait for its next request."""
DRAIN_S: Final = 5.0
"""How long the rest of a body is read whose request has been answered, so that the answer is heard."""
STALL_S: Final = 60.0
"""How long a client may read nothing of what waits for it."""


class BoundedProtocol(H11Protocol):
    """One connection.  The arguments are uvicorn's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head = Alarm(self.loop, HEAD_S, self._hang_up)
        self._drain = Alarm(self.loop, DRAIN_S, self._hang_up)
        self._stall = Alarm(self.loop, STALL_S, self._hang_up)

    @property
    def answering(self) -> bool:
        """A request has begun whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, if there is a place for it."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            self._hang_up()
        else:
            self._head.start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_alarms()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came; the rest of a head must come soon."""
        super().data_received(data)
        if self.conn.their_state is not h11.SEND_BODY:
            self._drain.stop()
        if self.conn.their_state is not h11.IDLE:
            self._head.stop()
        elif not self.transport.is_closing():
            self._head.start()

    def on_response_complete(self) -> None:
        """Go on to the next request; what is left of this one is not read for ever."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._drain.start()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over."""
        self._stop_alarms()
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
        headers, body = malformed(msg)
        answer = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        # A HEAD whose body is broken has an answer without one.
        of_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        for part in (answer, h11.Data(data=b"" if of_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def _hang_up(self) -> None:
        self.transport.abort()

    def _stop_alarms(self) -> None:
        for alarm in (self._head, self._drain, self._stall):
            alarm.stop()


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

"""A session that WebSockets serve, one after the other if its client can resume it, and what it sends."""

import asyncio
import hmac
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocket

from gateway.access.account import Principal
from gateway.fairness.quota import Hold
from gateway.http.connection import NORMAL, ClientGoneError, close, received, send
from gateway.http.realtime.session import Session
from omnirelay.errors import SessionNotResumedError


class Outbox:
    """Sends over one connection at a time; while there is none, events are only kept.

    Args:
        limit: Bytes of written events that are kept; 0: none, and the events show no numbers.

    Attributes:
        last: The number of the newest event.
        connected: Whether there is a connection.
    """

    def __init__(self, limit: int) -> None:
        self.last = 0
        self.limit: Final = limit
        self._kept = deque[bytes]()
        self._size = 0
        self._written = 0
        self.connected = True
        self._closed = False
        self._grown = asyncio.Event()
        self._moved = asyncio.Event()

    async def send(self, kind: str, fields: dict[str, Any]) -> None:
        """Send an event; wait until the connection, if there is one, has taken it.

        A cancelled caller's event is sent nevertheless, because it has its number.

        Raises:
            ClientGoneError: The session has ended.
        """
        if self._closed:
            raise ClientGoneError
        self.last = number = self.last + 1
        event: dict[str, Any] = {"type": kind, "event_id": f"event_{number:x}"}
        if self.limit:
            event["sequence_number"] = number
        data = msgspec.json.encode(event | fields)
        self._kept.append(data)
        self._size += len(data)
        self._forget()
        self._grown.set()
        while self.connected and self._written < number:
            await self._moved.wait()
        if self._closed:
            raise ClientGoneError

    def connect(self, after: int) -> bool:
        """Begin with the event after a number; false if that is not kept any more, or not sent yet."""
        if not self.last - len(self._kept) <= after <= self.last:
            return False
        self.connected, self._written = True, after
        return True

    async def write(self, write: Callable[[str], Awaitable[None]], taken: asyncio.Event) -> None:
        """Write events as they come, until cancelled, ``write`` fails, or a newer connection is there."""
        while not taken.is_set():
            if self._written == self.last:
                self._grown.clear()
                await self._grown.wait()
                continue
            await write(self._kept[self._written - self.last].decode())
            if not taken.is_set():
                self._written += 1
                self._forget()
                self._move()

    def disconnect(self) -> None:
        """Have nobody wait for a connection."""
        self.connected = False
        self._forget()
        self._move()

    def close(self) -> None:
        """The session has ended: who sends learns that the client is gone."""
        self._closed = True
        self.disconnect()

    def _move(self) -> None:
        self._moved.set()
        self._moved.clear()

    def _forget(self) -> None:
        """Drop the oldest events beyond the limit; none that the connection waits for."""
        while self._size > self.limit and self._kept:
            if self.connected and self.last - len(self._kept) >= self._written:
                return
            self._size -= len(self._kept.popleft())


NO_CODE: Final = 1005
POLICY: Final = 1008
TAKEN_OVER: Final = "taken_over"
IDLE_S: Final = 600.0
"""Time limit between two events of a client while no response is generated."""
STOPPING_S: Final = 0.5
"""How soon a session that nobody serves ends when the gateway stops: nobody can connect to it any more."""
SECRET_BYTES: Final = 32
RESUME_HEADER: Final = "omnirelay-resume-secret"
RESUME_SUBPROTOCOL: Final = "omnirelay-resume-secret."
"""Prefix of a WebSocket subprotocol that carries a secret: browsers cannot set headers of a WebSocket."""
log = logging.getLogger(__name__)


def secret_of(connection: HTTPConnection) -> str:
    """Return the secret with which a client resumes a session; empty if it has none, or several."""
    given = connection.headers.getlist(RESUME_HEADER)
    offered = [each for each in connection.scope["subprotocols"] if each.startswith(RESUME_SUBPROTOCOL)]
    found = given or [each.removeprefix(RESUME_SUBPROTOCOL) for each in offered]
    return found[0] if len(found) == 1 else ""


@dataclass(eq=False)
class LiveSession:
    """A session, and the connection that serves it now.  Must be closed.

    Attributes:
        session: What is served.
        taken: Set when another connection serves the session; each connection has its own.
        hold: The memory of the events that are kept.
        _owner: Who alone may resume it.
        resume_s: How long it waits for its client; 0 if it ends with its connection.
    """

    session: Session
    _outbox: Outbox
    hold: Hold
    _owner: Principal
    resume_s: float
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    _secret: str = field(default_factory=lambda: secrets.token_urlsafe(SECRET_BYTES))
    _begun: bool = False
    _received: int = 0
    _handling: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def detached(self) -> bool:
        """Whether no connection serves it."""
        return not self._outbox.connected

    def admits(self, client: Principal, secret: str) -> bool:
        """Whether a client may resume it: with the secret, and the key that began it, if any."""
        same = client is self._owner if self._owner.keyed else not client.keyed
        return hmac.compare_digest(secret.encode(), self._secret.encode()) and same

    def connect(self, after: int) -> bool:
        """Take the session over, to be served from the event after a number; false if that is not kept."""
        if not self._outbox.connect(after):
            return False
        self.taken.set()
        self.taken = asyncio.Event()
        return True

    async def serve(
        self, socket: WebSocket, taken: asyncio.Event, not_resumed: SessionNotResumedError | None
    ) -> bool:
        """Serve an accepted connection; true if it was lost, false if the session is over.

        Args:
            taken: The connection's own.
            not_resumed: Why it has not got the session that it asked for.
        """
        resumed, self._begun = self._begun, True
        if resumed:
            # Not one of the numbered events: what follows is what would have come without the loss.
            told = {"type": "session.resumed", "event_id": "event_resumed", "received_events": self._received}
            await send(socket, msgspec.json.encode({**told, "session": {"id": self.session.id}}).decode())
        if taken.is_set():
            await close(socket, POLICY, TAKEN_OVER)
            return False
        begins = None if resumed else partial(self._begin, not_resumed)
        reading = asyncio.create_task(self._read(socket, taken, begins))
        writing = asyncio.create_task(self._outbox.write(partial(send, socket), taken))
        slow, over = asyncio.create_task(self.session.too_slow.wait()), asyncio.create_task(taken.wait())
        tasks = (reading, writing, slow, over)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if taken.is_set() or slow.done():
                writing.cancel()
                await close(socket, POLICY, TAKEN_OVER if taken.is_set() else "client_too_slow")
                return False
            if not reading.done():
                # A client that has closed on purpose may not have been read so far.
                self._outbox.disconnect()
            return await reading
        finally:
            if not taken.is_set():
                self._outbox.disconnect()
            try:
                if self.resume_s:
                    # What the client sent is processed to its end: it is told that it has arrived.
                    async with self._handling:
                        pass
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def linger(self, taken: asyncio.Event, stopping: Callable[[], bool]) -> None:
        """Wait until another connection has taken the session, or none can, or it is too late."""
        if not taken.is_set():
            self._outbox.disconnect()
        clock = asyncio.get_running_loop().time
        until = clock() + self.resume_s
        while not taken.is_set() and (left := until - clock()) > 0 and not stopping():
            with suppress(TimeoutError):
                await asyncio.wait_for(taken.wait(), min(left, STOPPING_S))

    async def close(self) -> None:
        """End the session."""
        self._outbox.close()
        # Of a connection that has lost it, and would add to it.
        async with self._handling:
            await self.session.close()
        self.hold.release()

    async def _begin(self, not_resumed: SessionNotResumedError | None) -> None:
        resume = {"secret": self._secret, "seconds": self.resume_s}
        await self.session.begin({"resume": resume} if self.resume_s else {})
        if not_resumed is not None:
            await self.session.tell(not_resumed, None)

    async def _read(
        self, socket: WebSocket, taken: asyncio.Event, begins: Callable[[], Awaitable[None]] | None
    ) -> bool:
        """Process what the client sends; true if the connection was lost."""
        if begins is not None:
            await begins()
        while True:
            try:
                message = await received(socket.receive, IDLE_S, lambda: self.session.answering)
            except TimeoutError:
                log.info("closing %s: no event for %.0f s", self.session.id, IDLE_S)
                await socket.close(NORMAL, "idle")
                return False
            if message["type"] == "websocket.disconnect":
                # Without a close frame there is no reason.
                return not ("reason" in message and message["code"] in {NORMAL, NO_CODE})
            async with self._handling:
                if taken.is_set():
                    return False
                self._received += 1
                await self.session.receive(message.get("text"))

"""The open sessions, over WebSockets and WebRTC."""

import asyncio
from typing import Final

from starlette.requests import HTTPConnection

from gateway.fairness.quota import Quota
from gateway.http.context import HttpContext
from gateway.http.realtime.events import EventError, read_event
from gateway.http.realtime.session import Session
from gateway.http.realtime.settings import Settings
from gateway.http.realtime.transport import Transport
from gateway.http.realtime.turns.pool import VoicePool
from gateway.requests.metrics import Connection
from omnirelay.errors import BusyError, InvalidRequestError, OmniRelayError
from omnirelay.protocol import PIECE_BYTES

MAX_SESSIONS: Final = 64
"""Open sessions, of all clients together."""
RETRY_MS: Final = 5000


class Sessions:
    """Counts sessions by client, and holds what they share."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._open = Quota(MAX_SESSIONS)
        self._voices = VoicePool()

    def check(self, client: str) -> None:
        """Refuse one session too many, or at shutdown.

        Raises:
            BusyError: Try again later.
        """
        if self._context.gateway.stopping or not self._open.has_for(client):
            open_ones = f"{self._open.used} sessions are open, {self._open.own(client)} of them this client's"
            raise BusyError(f"{open_ones}: try again later", RETRY_MS)

    def take(self, client: str, connection: Connection) -> None:
        """Count a session that was checked."""
        self._open.take(client)
        self._context.gateway.metrics.sessions.labels(connection).inc()

    def give(self, client: str, connection: Connection) -> None:
        """A session has ended."""
        self._open.give(client)
        self._context.gateway.metrics.sessions.labels(connection).dec()

    def open(self, connection: HTTPConnection, transport: Transport, settings: Settings) -> Session:
        """Open a session for a client; it must be closed."""
        account, client = self._context.account(connection), self._context.share(connection)
        return Session(self._context, account, transport, client, self._voices, settings)


async def receive(text: str | None, session: Session) -> None:
    """Process a client's message, which is none if it was not text; its errors are sent back.

    Raises:
        ClientGoneError: The client disconnected.
    """
    event_id = None
    try:
        if text is None:
            raise InvalidRequestError("events must be text messages, not binary ones")
        large = len(text) > PIECE_BYTES
        event = await asyncio.to_thread(read_event, text) if large else read_event(text)
        event_id = event.event_id
        await session.handle(event)
    except EventError as error:
        await session.tell(error.error, error.event_id)
    except OmniRelayError as error:
        await session.tell(error, event_id)

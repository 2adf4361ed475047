"""``/v1/realtime``: the open sessions, their WebSockets, and the ephemeral keys that open them."""

import asyncio
import logging
import time
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.access.ephemeral import EphemeralKey
from gateway.fairness.memory_budget import Hold
from gateway.fairness.quota import Quota
from gateway.http.body import read_body, read_object
from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.errors import JSON, response_of
from gateway.http.fields import convert
from gateway.http.guards.keys import client_of, ephemeral_of
from gateway.http.realtime.events import EventError, EventTransport, Transport, read_event
from gateway.http.realtime.items import new_session_id
from gateway.http.realtime.session import Session
from gateway.http.realtime.settings import Settings, changed_settings, shown_warnings
from gateway.http.realtime.turns.pool import VoicePool
from gateway.requests.metrics import Connection
from omnirelay.errors import BusyError, InvalidRequestError, OmniRelayError, UnsupportedError
from omnirelay.protocol import PIECE_BYTES

log = logging.getLogger(__name__)


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


MAX_BYTES: Final = 2**18
"""Of the body of a request."""
LIFE_S: Final = 600
SECOND_S: Final = 1.0
"""Of a key's life; shorter in tests."""


class _Expiry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=10, le=7200)] = LIFE_S


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    expires_after: _Expiry = _Expiry()
    session: dict[str, Any] = {}


class ClientSecretsApi:
    """The endpoint."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        """Make a key.

        Raises:
            OmniRelayError: As the body's fields, or there are too many keys.
        """
        context = self._context
        body = await read_body(request, context, bytes, MAX_BYTES)
        values = read_object(bytearray(body)) if body else {}
        given = {name: value for name, value in values.items() if value is not None}
        fields = convert(given, _Fields)
        warnings: list[UnsupportedError] = []
        settings = changed_settings(context, Settings(), fields.session, "session", warnings.append)
        share, life = context.share(request), fields.expires_after.seconds
        hold = Hold(context.gateway.held.of(share))
        hold.grow(len(body))
        key = EphemeralKey(client_of(request.scope), msgspec.json.encode(fields.session))
        try:
            value = context.access.ephemeral.make(key, share, hold, life * SECOND_S)
        except BusyError:
            hold.release()
            raise
        shown = {
            "value": value,
            "expires_at": int(time.time()) + life,
            "session": settings.shown(new_session_id(), context.model),
            "warnings": shown_warnings(warnings),
        }
        return Response(msgspec.json.encode(shown), media_type=JSON, headers={"Cache-Control": "no-store"})


def first_settings(context: HttpContext, connection: HTTPConnection) -> Settings:
    """Return the settings of a client's session at its beginning: those of its ephemeral key, if it has one.

    Raises:
        UnknownModelError: The query's model is unknown; a session of transcription may name any.
        OmniRelayError: The key's settings have become invalid.
    """
    settings, query = Settings(), connection.query_params
    if (key := ephemeral_of(connection.scope)) is not None:
        values = msgspec.json.decode(key.session)
        settings = changed_settings(context, settings, values, "session", lambda _: None)
    if query.get("intent") == "transcription":
        settings = replace(settings, kind="transcription")
    if settings.kind == "realtime":
        context.require_model(query.get("model", context.model))
    return settings


IDLE_S: Final = 600.0
"""Time limit between two events of a client while no response is generated."""
SUBPROTOCOL: Final = "realtime"
NORMAL: Final = 1000
POLICY: Final = 1008


class RealtimeApi:
    """The endpoint; ``idle_s`` replaces :data:`IDLE_S` in tests."""

    def __init__(self, context: HttpContext, sessions: Sessions, idle_s: float = IDLE_S) -> None:
        self._context = context
        self._sessions = sessions
        self._idle_s = idle_s
        self._events = 0

    async def refuse(self, request: Request) -> Response:
        """Refuse a request that is not a WebSocket handshake.

        Raises:
            HTTPException: 426.
        """
        del request
        raise HTTPException(
            426,
            "/v1/realtime is a WebSocket: client and proxies must send Upgrade: websocket",
            {"Upgrade": "websocket"},
        )

    async def serve(self, socket: WebSocket) -> None:
        """Serve one client until it disconnects."""
        client = self._context.share(socket)
        try:
            settings = first_settings(self._context, socket)
            self._sessions.check(client)
        except OmniRelayError as error:
            self._context.told(error)
            await socket.send_denial_response(response_of(error))
            return
        self._sessions.take(client, "websocket")
        try:
            offered = socket.scope["subprotocols"]
            await socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
            await self._converse(socket, settings)
        except (ClientGoneError, WebSocketDisconnect) as error:
            log.debug("a realtime client disconnected: %s", error)
        finally:
            self._sessions.give(client, "websocket")

    async def _converse(self, socket: WebSocket, settings: Settings) -> None:
        async def send(kind: str, fields: dict[str, Any]) -> None:
            self._events += 1
            event = {"type": kind, "event_id": f"event_{self._events:x}", **fields}
            try:
                await socket.send_text(msgspec.json.encode(event).decode())
            except (WebSocketDisconnect, RuntimeError) as error:
                # Starlette raises RuntimeError if this side has closed the connection meanwhile.
                raise ClientGoneError from error

        session = self._sessions.open(socket, EventTransport(send), settings)
        reading = asyncio.create_task(self._read(socket, session))
        slow = asyncio.create_task(session.too_slow.wait())
        try:
            await asyncio.wait({reading, slow}, return_when=asyncio.FIRST_COMPLETED)
            if slow.done():
                await socket.close(POLICY, "client_too_slow")
            else:
                reading.result()
        finally:
            reading.cancel()
            slow.cancel()
            await asyncio.gather(reading, slow, return_exceptions=True)
            await session.close()

    async def _read(self, socket: WebSocket, session: Session) -> None:
        await session.begin()
        while True:
            try:
                async with asyncio.timeout(self._idle_s):
                    message = await socket.receive()
            except TimeoutError:
                if session.answering:
                    continue
                log.info("closing %s: no event for %.0f s", session.id, self._idle_s)
                await socket.close(NORMAL, "idle")
                return
            if message["type"] == "websocket.disconnect":
                return
            await receive(message.get("text"), session)

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

from gateway.access.api_keys import EphemeralKey
from gateway.fairness.quota import Quota
from gateway.http.body import read_body, read_object
from gateway.http.connection import ClientGoneError
from gateway.http.context import Api, HttpContext
from gateway.http.errors import json_response, response_of
from gateway.http.fields import convert_given
from gateway.http.guards import client_of, ephemeral_of
from gateway.http.realtime.events import Transport
from gateway.http.realtime.items import new_session_id
from gateway.http.realtime.session import Session
from gateway.http.realtime.settings import Settings, changed_settings, shown_warnings
from gateway.http.realtime.turn_detection import VoicePool
from gateway.http.realtime.websocket import LiveSession, Outbox, secret_of
from gateway.http.voice.smart_turn import EndDetector, SmartTurn
from gateway.requests.metrics import Connection
from omnirelay.errors import (
    BusyError,
    InvalidRequestError,
    OmniRelayError,
    SessionNotResumedError,
    UnsupportedError,
)

log = logging.getLogger(__name__)
MAX_SESSIONS: Final = 64
"""Open sessions, of all clients together."""
RETRY_MS: Final = 5000
SESSION: Final = "session_id"
AFTER: Final = "starting_after"
"""Names in the query of a client that resumes its session."""
MAX_DIGITS: Final = 16
SUBPROTOCOL: Final = "realtime"
MAX_BYTES: Final = 2**18
"""Of the body of a request."""
LIFE_S: Final = 600
SECOND_S: Final = 1.0
"""Of a key's life; shorter in tests."""


class Expiry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a key lives."""

    anchor: Literal["created_at"] = "created_at"
    seconds: Annotated[int, Meta(ge=10, le=7200)] = LIFE_S


class ClientSecretFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a request."""

    expires_after: Expiry = Expiry()
    session: dict[str, Any] = {}


class RealtimeApi(Api):
    """The endpoints; counts sessions by client, and holds what they share.

    Raises:
        OmniRelayError: ``gateway.turn_model`` cannot be used.
    """

    def __init__(self, context: HttpContext) -> None:
        super().__init__(context)
        self._open = Quota(MAX_SESSIONS)
        self._voices = VoicePool(_end_detector(context))
        self._resumable: dict[str, LiveSession] = {}

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
        """Hold a realtime session, until another connection resumes it."""
        not_resumed: SessionNotResumedError | None = None
        try:
            try:
                live = await self.find(socket)
            except SessionNotResumedError as error:
                live, not_resumed = None, error
            if live is None:
                live = self.begin(socket, await first_settings(self._context, socket))
        except OmniRelayError as error:
            self._context.told(error)
            await socket.send_denial_response(response_of(error))
            return
        taken = live.taken
        try:
            try:
                offered = socket.scope["subprotocols"]
                await socket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
                lost = await live.serve(socket, taken, not_resumed)
            except (ClientGoneError, WebSocketDisconnect) as error:
                log.debug("a realtime client disconnected: %s", error)
                lost = True
            if lost and live.resume_s and not taken.is_set():
                await self.linger(live, taken)
        finally:
            if not taken.is_set():
                await self.end(live)

    async def create_secret(self, request: Request) -> Response:
        """Make a short-lived key for realtime sessions.

        Raises:
            OmniRelayError: As the body's fields, or there are too many keys.
        """
        context = self._context
        body = await read_body(request, context, bytes, MAX_BYTES)
        values = read_object(bytearray(body)) if body else {}
        fields: ClientSecretFields = convert_given(values, ClientSecretFields)
        warnings: list[UnsupportedError] = []
        share, life = context.share(request), fields.expires_after.seconds
        settings = await changed_settings(
            context, share, Settings(), fields.session, "session", warnings.append
        )
        hold = context.gateway.held.of(share)
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
        return json_response(shown, headers={"Cache-Control": "no-store"})

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

    def begin(self, socket: WebSocket, settings: Settings) -> LiveSession:
        """Begin a session of a WebSocket; :meth:`end` must follow.

        Raises:
            BusyError: Try again later.
        """
        client, gateway = self._context.share(socket), self._context.config.gateway
        self.check(client)
        query = socket.query_params
        asked = query.get("resume") == "true" or SESSION in query
        resume_s = gateway.realtime_resume_s if asked else 0.0
        outbox = Outbox(gateway.limits.realtime_resume_bytes if resume_s else 0)
        hold = self._context.gateway.held.of(client)
        hold.grow(outbox.limit)
        session = self.open(socket, Transport(outbox.send), settings)
        live = LiveSession(session, outbox, hold, client_of(socket.scope), resume_s)
        self.take(client, "websocket")
        if resume_s:
            self._resumable[session.id] = live
        return live

    async def find(self, socket: WebSocket) -> LiveSession | None:
        """Connect a WebSocket to the session that it names; none if it names none.

        Raises:
            InvalidRequestError: The number of the last event is malformed; the session stays.
            SessionNotResumedError: There is no such session of this client, or it has ended now, because its
                events are not kept.
        """
        name = socket.query_params.get(SESSION)
        if name is None:
            return None
        live, after = self._resumable.get(name), socket.query_params.get(AFTER, "0")
        resumes = self._context.gateway.metrics.session_resumes
        if live is None or not live.admits(client_of(socket.scope), secret_of(socket)):
            resumes.labels("refused").inc()
            raise SessionNotResumedError(
                "no session of this client has this id and this secret, or it has ended", SESSION
            )
        if not (after.isascii() and after.isdigit() and len(after) < MAX_DIGITS):
            raise InvalidRequestError(f"{AFTER} must be the number of the last event that arrived", AFTER)
        detached = live.detached
        if live.connect(int(after)):
            resumes.labels("resumed" if detached else "taken_over").inc()
            return live
        resumes.labels("refused").inc()
        # Its client goes on with a new one, which may need its place.
        live.taken.set()
        await self.end(live)
        raise SessionNotResumedError(
            f"the events after {after} are not kept (gateway.limits.realtime_resume_bytes), or not sent yet",
            AFTER,
        )

    async def linger(self, live: LiveSession, taken: asyncio.Event) -> None:
        """Wait for the next connection of a session that has lost its own."""
        metrics = self._context.gateway.metrics
        metrics.sessions.labels("websocket").dec()
        with metrics.sessions.labels("detached").track_inprogress():
            await live.linger(taken, lambda: self._context.gateway.stopping)
        metrics.sessions.labels("websocket").inc()
        if not taken.is_set():
            metrics.session_resumes.labels("expired").inc()

    async def end(self, live: LiveSession) -> None:
        """End a session that began here."""
        self._resumable.pop(live.session.id, None)
        try:
            await live.close()
        finally:
            self.give(live.hold.client, "websocket")

    def open(self, connection: HTTPConnection, transport: Transport, settings: Settings) -> Session:
        """Open a session for a client; it must be closed."""
        account, client = self._context.account(connection), self._context.share(connection)
        return Session(self._context, account, transport, client, self._voices, settings)


def _end_detector(context: HttpContext) -> EndDetector | None:
    where = context.config.gateway.turn_model
    if where is None:
        return None
    network = SmartTurn(where)
    metrics = context.gateway.metrics
    return EndDetector(
        network.finished, lambda verdict: metrics.turn_ends.labels(verdict).inc(), metrics.turn_detection.inc
    )


async def first_settings(context: HttpContext, connection: HTTPConnection) -> Settings:
    """Return the settings of a client's session at its beginning: those of its ephemeral key, if it has one.

    Raises:
        UnknownModelError: The query's model is unknown; a session of transcription may name any.
        OmniRelayError: The key's settings have become invalid.
    """
    settings, query = Settings(), connection.query_params
    if (key := ephemeral_of(connection.scope)) is not None:
        values = msgspec.json.decode(key.session)
        share = context.share(connection)
        settings = await changed_settings(context, share, settings, values, "session", lambda _: None)
    if query.get("intent") == "transcription":
        settings = replace(settings, kind="transcription")
    if settings.kind == "realtime":
        context.require_model(query.get("model", context.model))
    return settings

"""``/v1/realtime``: WebSockets of sessions."""

import asyncio
import logging
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.errors import response_of
from gateway.http.realtime.opening.client_secrets import first_settings
from gateway.http.realtime.opening.sessions import Sessions, receive
from gateway.http.realtime.session import Session
from gateway.http.realtime.settings import Settings
from gateway.http.realtime.transport import EventTransport
from omnirelay.errors import OmniRelayError

IDLE_S: Final = 600.0
"""Time limit between two events of a client while no response is generated."""
SUBPROTOCOL: Final = "realtime"
NORMAL: Final = 1000
POLICY: Final = 1008

log = logging.getLogger(__name__)


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
            self._context.require_model(socket.query_params.get("model", self._context.model))
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

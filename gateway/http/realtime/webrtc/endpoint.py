"""``/v1/realtime/calls``: calls begin and end."""

import asyncio
import logging
import secrets
from contextlib import AsyncExitStack
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from gateway.access.places import Place
from gateway.fairness.quota import Quota
from gateway.http.body import read_body, read_object
from gateway.http.context import HttpContext
from gateway.http.multipart import TYPE, read_form
from gateway.http.realtime.endpoint import RETRY_MS, RealtimeApi, first_settings
from gateway.http.realtime.settings import changed_settings, refuse
from gateway.http.realtime.webrtc.call import Call, CallTransport
from gateway.http.realtime.webrtc.peer import Peer, read_offer
from gateway.requests.metrics import CallEnd
from omnirelay.errors import BusyError, InvalidRequestError, OmniRelayError, UnknownRequestError

SDP: Final = "application/sdp"
MAX_BYTES: Final = 2**18
"""Of the body of a request: the offer, and the settings of the session."""
log = logging.getLogger(__name__)


class CallsApi:
    """The endpoints."""

    def __init__(self, context: HttpContext, sessions: RealtimeApi) -> None:
        self._context = context
        self._sessions = sessions
        self._quota = Quota(context.config.gateway.webrtc.max_calls)
        self._held: dict[str, Call] = {}

    async def create(self, request: Request) -> Response:
        """Begin a call.

        Raises:
            InvalidRequestError: The offer or the settings are invalid.
            BusyError: There are too many sessions or connections.
        """
        context, client = self._context, self._context.share(request)
        settings = await first_settings(context, request)
        body = await read_body(request, context, bytes, MAX_BYTES)
        sdp, values = _read(request.headers.get("content-type", ""), bytearray(body))
        offer = read_offer(sdp)
        settings = await changed_settings(context, client, settings, values, "session", refuse)
        self._check(client)
        call_id, transport = f"rtc_{secrets.token_hex(16)}", CallTransport()
        async with AsyncExitStack() as held:
            held.callback(self._held.pop, call_id, None)
            held.callback(self._place(request, client, call_id).leave)
            self._sessions.take(client, "webrtc")
            held.callback(self._sessions.give, client, "webrtc")
            self._quota.take(client)
            held.callback(self._quota.give, client)
            peer = Peer(transport.track, context.config.gateway.webrtc)
            held.push_async_callback(peer.close)
            call = self._held[call_id] = Call(
                call_id,
                client,
                peer,
                transport,
                lambda: self._sessions.open(request, transport, settings),
                context.config.gateway.webrtc.max_call_s,
            )
            answer = offer.complete(await peer.answer(offer.sdp))
            task = asyncio.create_task(self._hold(call, held.pop_all()))
        context.calls.add(task)
        task.add_done_callback(context.calls.discard)
        return Response(answer, 201, {"Location": f"{request.url.path}/{call_id}"}, SDP)

    async def hang_up(self, request: Request) -> Response:
        """End a call.

        Raises:
            UnknownRequestError: The client has no such call.
        """
        call = self._held.get(request.path_params["call_id"])
        keyed = self._context.access.keys.needed
        if call is None or (keyed and call.holder != self._context.share(request)):
            raise UnknownRequestError("there is no such call: it has ended, or is of another key")
        call.hang_up()
        return Response()

    async def _hold(self, call: Call, held: AsyncExitStack) -> None:
        """Hold a call, and free then what is held for it."""
        end: CallEnd = "failed"
        try:
            async with held:
                end = await call.run()
        except OmniRelayError as error:
            log.warning("%s failed: %s", call.id, error.for_log)
        finally:
            self._context.gateway.metrics.calls.labels(end).inc()

    def _check(self, client: str) -> None:
        self._sessions.check(client)
        if not self._quota.has_for(client):
            raise BusyError(
                f"{self._quota.used} calls are held, {self._quota.own(client)} of them this client's "
                f"(gateway.webrtc.max_calls is {self._quota.total}): try again later, or by WebSocket",
                RETRY_MS,
            )

    def _place(self, request: Request, client: str, call_id: str) -> Place:
        """Count the call as a connection."""
        address = request.client.host if request.client else ""

        def hang_up() -> None:
            self._held[call_id].hang_up()

        place = self._context.access.http_places.take(address, hang_up)
        if place is None or not place.move(client):
            if place is not None:
                place.leave()
            raise BusyError("too many connections of this client are open", RETRY_MS)
        return place


def _read(content_type: str, body: bytearray) -> tuple[bytes, dict[str, Any]]:
    """Return the offer of a request, and the fields of its session."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == SDP:
        return bytes(body), {}
    if kind != TYPE:
        raise InvalidRequestError(f"send the SDP offer as {SDP}, or as {TYPE} with sdp and session")
    form = read_form(content_type, body)
    fields: dict[str, bytes] = dict(form.files)
    for name, value in form.values.items():
        fields[name] = value.encode() if isinstance(value, str) else b""
    if unknown := fields.keys() - {"sdp", "session"}:
        raise InvalidRequestError(f"the form has {min(unknown)[:64]!r}: only sdp and session are known")
    if "sdp" not in fields:
        raise InvalidRequestError("the form has no sdp", "sdp")
    session = fields.get("session")
    return fields["sdp"], {} if session is None else read_object(bytearray(session))

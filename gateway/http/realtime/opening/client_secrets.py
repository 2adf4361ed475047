"""``/v1/realtime/client_secrets``: ephemeral keys, for browsers that must not hold a lasting one."""

import time
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from gateway.access.ephemeral import EphemeralKey
from gateway.fairness.memory_budget import Hold
from gateway.http.body import read_body, read_object
from gateway.http.context import HttpContext
from gateway.http.errors import JSON
from gateway.http.fields import convert
from gateway.http.guards.keys import client_of, ephemeral_of
from gateway.http.realtime.items import new_session_id
from gateway.http.realtime.settings import Settings, changed_settings, refuse
from omnirelay.errors import BusyError

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
        settings = changed_settings(context, Settings(), fields.session, "session", refuse)
        share, life = context.share(request), fields.expires_after.seconds
        hold = Hold(context.gateway.held.of(share))
        hold.grow(len(body))
        key = EphemeralKey(client_of(request.scope), fields.session)
        try:
            value = context.access.ephemeral.make(key, share, hold, life * SECOND_S)
        except BusyError:
            hold.release()
            raise
        shown = {
            "value": value,
            "expires_at": int(time.time()) + life,
            "session": settings.shown(new_session_id(), context.model),
        }
        return Response(msgspec.json.encode(shown), media_type=JSON, headers={"Cache-Control": "no-store"})


def first_settings(context: HttpContext, connection: HTTPConnection) -> Settings:
    """Return the settings of a client's session at its beginning: those of its ephemeral key, if it has one.

    Raises:
        OmniRelayError: They have become invalid.
    """
    key = ephemeral_of(connection.scope)
    if key is None:
        return Settings()
    return changed_settings(context, Settings(), key.session, "session", refuse)

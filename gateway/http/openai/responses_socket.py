"""WebSockets on ``/v1/responses``: one response after the other, each as its events."""

import asyncio
from contextlib import closing
from functools import partial
from typing import Any, Final

from starlette.websockets import WebSocket

from gateway.http.answer import HttpAnswer
from gateway.http.body import parsed, read_object, size_of
from gateway.http.connection import NORMAL, JsonSocket
from gateway.http.context import HttpContext
from gateway.http.errors import body_of, status_of
from gateway.http.guards import client_of
from gateway.http.openai.response_writer import empty_response
from gateway.http.openai.responses import CANCEL, NAMES, ResponseOptions, ResponsesApi
from omnirelay.errors import BusyError, CancelledRequestError, InvalidRequestError, OmniRelayError
from omnirelay.protocol import GenerateRequest
from omnirelay.tasks import first_of

IDLE_S: Final = 600.0
"""Time limit between two messages of a client that waits for nothing."""
MAX_WAITING: Final = 1
"""Messages that wait for the response to an earlier one; further ones are not read before."""
MAX_CANCEL: Final = 1024
"""Characters of an event that cancels."""


class ResponsesSocket:
    """The endpoint."""

    def __init__(self, context: HttpContext, api: ResponsesApi) -> None:
        self._context = context
        self._api = api

    async def serve(self, socket: WebSocket) -> None:
        """Answer responses one after the other, until the client disconnects or is idle."""
        await _Connection(socket, self._context, self._api).serve()


class _Connection(JsonSocket):
    """One client: what it asked for, and the response that is being generated."""

    def __init__(self, socket: WebSocket, context: HttpContext, api: ResponsesApi) -> None:
        super().__init__(socket, context, IDLE_S)
        self._api = api
        self._waiting: asyncio.Queue[str] = asyncio.Queue(MAX_WAITING)
        self._answering = asyncio.Lock()
        self._current: HttpAnswer | None = None
        # The client has cancelled it, or the one whose request is still read.
        self._cancelled = False

    async def _converse(self) -> None:
        await first_of(self._read(), self._answer())

    async def _read(self) -> None:
        """Take messages until the client disconnects, or is idle."""
        while True:
            try:
                text = await self._next(self._answering.locked)
            except TimeoutError:
                await self._socket.close(NORMAL, "idle")
                return
            if self._cancels(text):
                continue
            try:
                self.hold.grow(size_of(text))
            except BusyError as error:
                await self._refuse(error)
            else:
                await self._waiting.put(text)

    async def _answer(self) -> None:
        """Answer one message after the other."""
        while True:
            # No name for the text, which is not kept beside its request.
            request = self._request(await self._waiting.get())
            async with self._answering:
                try:
                    await self._respond(*await request)
                except OmniRelayError as error:
                    await self._refuse(error)
                self._cancelled = False

    def _cancels(self, text: str) -> bool:
        """Whether a message cancels a response; the one in progress is cancelled if it is meant."""
        if len(text) > MAX_CANCEL or CANCEL not in text:
            return False
        try:
            event = read_object(bytearray(text, "utf-8", "surrogatepass"))
        except InvalidRequestError:
            return False
        if event.get("type") != CANCEL:
            return False
        current, meant = self._current, event.get("response_id")
        if current is None:
            self._cancelled |= meant is None and (self._answering.locked() or not self._waiting.empty())
        elif meant in (None, f"resp_{current.request_id}"):
            self._cancelled = True
            self._context.gateway.cancel(current.request_id)
        return True

    async def _request(self, text: str) -> tuple[ResponseOptions, GenerateRequest]:
        try:
            client_of(self._socket.scope).check()
            read = partial(self._api.read, self._socket, event=True)
            body = bytearray(text, "utf-8", "surrogatepass")
            options, request = await parsed(self._context, self.hold.client, read, body)
        finally:
            self.hold.shrink(size_of(text))
        self._context.require_model(options.model)
        return options, request

    async def _respond(self, options: ResponseOptions, request: GenerateRequest) -> None:
        if not options.generate:
            await self._keep_only(options)
            return
        account = self._context.account(self._socket)
        with closing(await HttpAnswer.to(self._context.gateway, request, account, NAMES)) as answer:
            del request
            self._current = answer
            if self._cancelled:
                self._context.gateway.cancel(answer.request_id)
            writer = self._api.writer(self._socket, options, answer)
            try:
                async for event in writer.events():
                    await self._send(event)
            except CancelledRequestError:
                # Else the gateway stops.
                if not self._cancelled:
                    raise
                await self._send(writer.cancelled())
            finally:
                self._current = None

    async def _keep_only(self, options: ResponseOptions) -> None:
        """Keep the input of a request that asks for no output, for one that continues it."""
        response = empty_response(self._context.model, options.shown)
        self._api.keep(self._socket, response["id"], options, "")
        for number, kind in enumerate(("created", "completed")):
            await self._send({"type": f"response.{kind}", "sequence_number": number, "response": response})

    async def _refuse(self, error: OmniRelayError) -> None:
        self._context.told(error)
        await self._send(_error_event(error))


def _error_event(error: OmniRelayError) -> dict[str, Any]:
    """Describe an error in both of OpenAI's forms: as an object, and by fields of the event."""
    shown = body_of(error)["error"]
    fields = {name: shown[name] for name in ("code", "message", "param")}
    return {"type": "error", "sequence_number": 0, "status": status_of(error), "error": shown, **fields}

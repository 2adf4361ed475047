"""A session: settings, conversation, and the current response."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Any, Final

from gateway.access.account import ClientAccount
from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.errors import body_of
from gateway.http.fields import named
from gateway.http.realtime import events
from gateway.http.realtime.conversation import RealtimeConversation
from gateway.http.realtime.early import EarlyPrompt
from gateway.http.realtime.input_audio import InputAudio
from gateway.http.realtime.items import Item, read_item, sound_item
from gateway.http.realtime.response import Response, Send
from gateway.http.realtime.settings import Settings, read_options, refuse, split
from omnirelay.content import AudioPart, ChatMessage
from omnirelay.errors import InvalidRequestError, OmniRelayError, SlowClientError, UnsupportedError
from omnirelay.protocol import GenerateRequest
from shared.config import MediaConfig

log = logging.getLogger(__name__)


class Session:
    """One client's session.  Must be closed."""

    def __init__(self, context: HttpContext, account: ClientAccount, send: Send, client: str) -> None:
        self.id: Final = f"sess_{secrets.token_hex(10)}"
        self.too_slow: Final = asyncio.Event()
        """Set when the connection must be closed because the client reads too slowly."""
        self._context = context
        self._send = send
        self._account = account
        self._settings = Settings()
        media, held = _media_of(account, context.config.media), context.gateway.held.of(account.share)
        self._conversation = RealtimeConversation(media, held)
        self._audio = InputAudio(media, held)
        self._early = EarlyPrompt(context.gateway, account, client)
        self._response: Response | None = None
        self._answering: asyncio.Task[None] | None = None

    @property
    def answering(self) -> bool:
        """Whether a response is being generated."""
        return self._answering is not None and not self._answering.done()

    async def begin(self) -> None:
        """Send ``session.created``."""
        await self._send("session.created", {"session": self._shown()})

    async def handle(self, event: events.ClientEvent) -> None:
        """Process an event.

        Raises:
            OmniRelayError: It is refused; the session goes on.
            ClientGoneError: The client disconnected.
        """
        match event:
            case events.AppendAudio():
                self._audio.append(event.audio)
                # An answer that is still spoken may yet be cut short.
                if not self.answering:
                    self._early.heard(self._audio.size, self._heard_so_far)
            case events.CommitAudio():
                await self._commit()
            case events.ClearAudio():
                self._audio.clear()
                self._early.stop()
                await self._send("input_audio_buffer.cleared", {})
            case events.CreateResponse():
                await self._respond(event.response or {})
            case events.CancelResponse():
                await self._cancel(event.response_id)
            case events.SessionUpdate():
                warnings: list[UnsupportedError] = []
                self._settings = self._changed(event.session, "session", warnings.append)
                told = [{"param": each.param, "message": str(each)} for each in warnings]
                await self._send("session.updated", {"session": self._shown(), "warnings": told})
            case _:
                await self._edit(event)

    async def tell(self, error: OmniRelayError, event_id: str | None) -> None:
        """Send an error; the session goes on."""
        self._context.told(error)
        await self._send("error", {"error": {**body_of(error)["error"], "event_id": event_id}})

    async def close(self) -> None:
        """Cancel the response, and release all memory."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        self._early.stop()
        self._audio.clear()
        self._conversation.clear()

    async def _edit(self, event: events.ClientEvent) -> None:
        if isinstance(event, events.CreateItem):
            item = await asyncio.to_thread(read_item, event.item, "item")
            await self._added(item, self._conversation.add(item, event.previous_item_id))
        elif isinstance(event, events.DeleteItem):
            self._conversation.remove(event.item_id)
            await self._send("conversation.item.deleted", {"item_id": event.item_id})
        elif isinstance(event, events.TruncateItem):
            if self._response is not None and self._response.item_id == event.item_id:
                await self._interrupt()
            self._conversation.get(event.item_id).truncate(event.content_index, event.audio_end_ms)
            told = {"content_index": event.content_index, "audio_end_ms": event.audio_end_ms}
            await self._send("conversation.item.truncated", {"item_id": event.item_id, **told})

    async def _commit(self) -> None:
        """Make an item of the input audio; it interrupts a response."""
        wav, hold = self._audio.commit()
        self._early.stop()
        await self._interrupt()
        item = sound_item(wav)
        try:
            before = self._conversation.add(item, hold=hold)
        except OmniRelayError:
            hold.release()
            raise
        told = {"previous_item_id": before, "item_id": item.id}
        await self._send("input_audio_buffer.committed", told)
        await self._added(item, before)

    async def _added(self, item: Item, before: str | None) -> None:
        await self._make_room()
        told = {"previous_item_id": before, "item": item.shown()}
        await self._send("conversation.item.added", told)
        await self._send("conversation.item.done", told)
        if not self.answering:
            self._early.added(self._prompt)

    async def _make_room(self) -> None:
        for deleted in self._conversation.make_room():
            await self._send("conversation.item.deleted", {"item_id": deleted.id})

    async def _respond(self, values: dict[str, Any]) -> None:
        own, changes = split(values, events.ResponseOptions.__struct_fields__)
        options: events.ResponseOptions = read_options(own, events.ResponseOptions, "response")
        settings = self._changed(changes, "response", refuse)
        given = None if options.input is None else await self._given(options.input)
        await self._interrupt()
        await self._make_room()
        self._early.stop()
        messages = _instructed(self._conversation.messages() if given is None else given, settings)
        added = self._conversation if options.conversation == "auto" else None
        response = Response(
            self._context,
            self._account,
            self._send,
            settings,
            messages,
            added,
            options.metadata,
            self._early,
        )
        self._response = response
        self._answering = asyncio.create_task(self._answer(response))

    async def _answer(self, response: Response) -> None:
        try:
            await response.run()
        except ClientGoneError:
            log.debug("the client of %s disconnected", self.id)
        if isinstance(response.error, SlowClientError):
            self.too_slow.set()

    async def _cancel(self, response_id: str | None) -> None:
        response = self._response
        if not self.answering or response is None or response_id not in (None, response.id):
            raise InvalidRequestError("there is no such response to cancel")
        await self._interrupt()

    async def _interrupt(self) -> None:
        """Cancel the current response, if any, and wait for its last event."""
        if self._response is not None and self._answering is not None:
            self._response.cancel()
            await asyncio.wait({self._answering})
            self._response = None

    async def _given(self, items: list[dict[str, Any]]) -> list[ChatMessage]:
        """Convert items that replace the conversation."""
        messages = []
        for at, values in enumerate(items):
            if values.get("type") == "item_reference":
                item = self._conversation.get(str(values.get("id")))
            else:
                item = await asyncio.to_thread(read_item, values, f"response.input[{at}]")
            messages.append(item.message())
        return messages

    def _prompt(self) -> GenerateRequest:
        """Return what a response would ask now."""
        messages = _instructed(self._conversation.messages(), self._settings)
        return GenerateRequest(messages=messages, speech=self._settings.speech)

    def _heard_so_far(self) -> GenerateRequest:
        request = self._prompt()
        request.messages.append(ChatMessage("user", [AudioPart(data=memoryview(self._audio.so_far()))]))
        return request

    def _changed(
        self, values: dict[str, Any], where: str, unavailable: Callable[[UnsupportedError], None]
    ) -> Settings:
        settings = self._settings.changed(values, where, self._context.require_model, unavailable)
        if settings.voice != self._settings.voice:
            with named({"speaker": f"{where}.audio.output.voice"}):
                self._context.gateway.check_speaker(GenerateRequest(speech=True, speaker=settings.voice))
        return settings

    def _shown(self) -> dict[str, Any]:
        return self._settings.shown(self.id, self._context.model)


def _instructed(messages: list[ChatMessage], settings: Settings) -> list[ChatMessage]:
    """Return the messages, after the instructions if there are any."""
    return [ChatMessage("system", settings.instructions), *messages] if settings.instructions else messages


def _media_of(account: ClientAccount, media: MediaConfig) -> MediaConfig:
    """Return the media limits of a client."""
    most = account.client.limits.request_bytes
    if most is None:
        return media
    bounds = {name: min(getattr(media, name), most) for name in ("max_item_bytes", "max_request_bytes")}
    return media.model_copy(update=bounds)

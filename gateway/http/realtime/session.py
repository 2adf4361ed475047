"""One client's session: its settings, its conversation, and the answer that is being made."""

import asyncio
import logging
import secrets
from typing import Any, Final

from gateway.access.account import ClientAccount
from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.errors import body_of
from gateway.http.fields import named
from gateway.http.realtime.conversation import Conversation
from gateway.http.realtime.events import (
    AppendAudio,
    CancelResponse,
    ClearAudio,
    ClientEvent,
    CommitAudio,
    CreateItem,
    CreateResponse,
    DeleteItem,
    ResponseOptions,
    SessionUpdate,
    TruncateItem,
)
from gateway.http.realtime.input_audio import InputAudio
from gateway.http.realtime.items import Item, read_item, sound_item
from gateway.http.realtime.response import Response, Send
from gateway.http.realtime.settings import Settings, read_options, split
from omnirelay.content import ChatMessage
from omnirelay.errors import InvalidRequestError, OmniRelayError, SlowClientError
from omnirelay.protocol import GenerateRequest
from shared.config import MediaConfig

log = logging.getLogger(__name__)


class Session:
    """One session.  Close it in any case.

    Args:
        context: The gateway's parts.
        account: Whose session it is.
        send: Sends events.
    """

    def __init__(self, context: HttpContext, account: ClientAccount, send: Send) -> None:
        self.id: Final = f"sess_{secrets.token_hex(10)}"
        self.too_slow: Final = asyncio.Event()
        """The client does not read fast enough: hang up."""
        self._context = context
        self._send = send
        self._account = account
        self._settings = Settings()
        media, held = _media_of(account, context.config.media), context.gateway.held.of(account.share)
        self._conversation = Conversation(media, held)
        self._audio = InputAudio(media, held)
        self._response: Response | None = None
        self._answering: asyncio.Task[None] | None = None

    @property
    def answering(self) -> bool:
        """An answer is being made."""
        return self._answering is not None and not self._answering.done()

    async def begin(self) -> None:
        """Tell the client how the session begins."""
        await self._send("session.created", {"session": self._shown()})

    async def handle(self, event: ClientEvent) -> None:
        """Do what an event says.

        Raises:
            OmniRelayError: It cannot be done; the session goes on.
            ClientGoneError: Nobody listens any more.
        """
        match event:
            case AppendAudio():
                self._audio.append(event.audio)
            case CommitAudio():
                await self._commit()
            case ClearAudio():
                self._audio.clear()
                await self._send("input_audio_buffer.cleared", {})
            case CreateResponse():
                await self._respond(event.response or {})
            case CancelResponse():
                await self._cancel(event.response_id)
            case SessionUpdate():
                self._settings = self._changed(event.session, "session")
                await self._send("session.updated", {"session": self._shown()})
            case _:
                await self._edit(event)

    async def tell(self, error: OmniRelayError, event_id: str | None) -> None:
        """Tell the client of an error; the session goes on."""
        self._context.told(error)
        await self._send("error", {"error": {**body_of(error)["error"], "event_id": event_id}})

    async def close(self) -> None:
        """Cancel what is being made, and forget everything."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.gather(self._answering, return_exceptions=True)
        self._audio.clear()
        self._conversation.clear()

    async def _edit(self, event: ClientEvent) -> None:
        """Change the conversation."""
        if isinstance(event, CreateItem):
            item = await asyncio.to_thread(read_item, event.item, "item")
            await self._added(item, self._conversation.add(item, event.previous_item_id))
        elif isinstance(event, DeleteItem):
            self._conversation.remove(event.item_id)
            await self._send("conversation.item.deleted", {"item_id": event.item_id})
        elif isinstance(event, TruncateItem):
            if self._response is not None and self._response.item_id == event.item_id:
                await self._interrupt()
            self._conversation.get(event.item_id).truncate(event.content_index, event.audio_end_ms)
            told = {"content_index": event.content_index, "audio_end_ms": event.audio_end_ms}
            await self._send("conversation.item.truncated", {"item_id": event.item_id, **told})

    async def _commit(self) -> None:
        """What the user said becomes an item; whoever speaks while an answer comes does not want the rest."""
        wav, hold = self._audio.commit()
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

    async def _make_room(self) -> None:
        for forgotten in self._conversation.make_room():
            await self._send("conversation.item.deleted", {"item_id": forgotten.id})

    async def _respond(self, values: dict[str, Any]) -> None:
        own, changes = split(values, ResponseOptions.__struct_fields__)
        options: ResponseOptions = read_options(own, ResponseOptions, "response")
        settings = self._changed(changes, "response")
        given = None if options.input is None else await self._given(options.input)
        await self._interrupt()
        await self._make_room()
        messages = self._conversation.messages() if given is None else given
        if settings.instructions:
            messages.insert(0, ChatMessage("system", settings.instructions))
        added = self._conversation if options.conversation == "auto" else None
        response = Response(
            self._context, self._account, self._send, settings, messages, added, options.metadata
        )
        self._response = response
        self._answering = asyncio.create_task(self._answer(response))

    async def _answer(self, response: Response) -> None:
        try:
            await response.run()
        except ClientGoneError:
            log.debug("the client of %s went away", self.id)
        if isinstance(response.error, SlowClientError):
            self.too_slow.set()

    async def _cancel(self, response_id: str | None) -> None:
        response = self._response
        if not self.answering or response is None or response_id not in (None, response.id):
            raise InvalidRequestError("no response of that name is being made: there is nothing to cancel")
        await self._interrupt()

    async def _interrupt(self) -> None:
        """Cancel the answer that is being made, if there is one, and wait for its last event."""
        if self._response is not None and self._answering is not None:
            self._response.cancel()
            await asyncio.wait({self._answering})
            self._response = None

    async def _given(self, items: list[dict[str, Any]]) -> list[ChatMessage]:
        """The messages of items that stand in for the conversation."""
        messages = []
        for at, values in enumerate(items):
            if values.get("type") == "item_reference":
                item = self._conversation.get(str(values.get("id")))
            else:
                item = await asyncio.to_thread(read_item, values, f"response.input[{at}]")
            messages.append(item.message())
        return messages

    def _changed(self, values: dict[str, Any], where: str) -> Settings:
        settings = self._settings.changed(values, where, self._context.require_model)
        with named({"speaker": f"{where}.audio.output.voice"}):
            self._context.gateway.check_speaker(GenerateRequest(speech=True, speaker=settings.voice))
        return settings

    def _shown(self) -> dict[str, Any]:
        return self._settings.shown(self.id, self._context.model)


def _media_of(account: ClientAccount, media: MediaConfig) -> MediaConfig:
    """What sounds and pictures a request of this client may bring."""
    most = account.client.limits.request_bytes
    if most is None:
        return media
    bounds = {name: min(getattr(media, name), most) for name in ("max_item_bytes", "max_request_bytes")}
    return media.model_copy(update=bounds)

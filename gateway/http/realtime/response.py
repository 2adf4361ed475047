"""One response of a session, from ``response.created`` to ``response.done``."""

import asyncio
import binascii
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal

from gateway.access.account import ClientAccount
from gateway.http.answer import HttpAnswer, finish_reason, start_delay, usage_of
from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.errors import body_of
from gateway.http.fields import named
from gateway.http.realtime.conversation import RealtimeConversation
from gateway.http.realtime.early import EarlyPrompt
from gateway.http.realtime.items import Item
from gateway.http.realtime.playback import Playback
from gateway.http.realtime.settings import PCM, Settings
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import OmniRelayError
from omnirelay.events import AudioEvent, DoneEvent, TextEvent
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from shared.log import limited

Send = Callable[[str, dict[str, Any]], Awaitable[None]]
"""Sends an event of a type with fields."""
CancelReason = Literal["client_cancelled", "turn_detected"]
"""OpenAI's reasons of a cancelled response."""
NAMES: Final[Mapping[str, str | None]] = {"speaker": "audio.output.voice", "messages": None}
"""Names here of fields of a :class:`omnirelay.protocol.GenerateRequest`, where they differ."""
log = logging.getLogger(__name__)


class Response:
    """A response to ``messages``; its answer is added to the conversation, if one is given.

    ``early`` has had the beginning of the prompt computed.
    """

    def __init__(
        self,
        context: HttpContext,
        account: ClientAccount,
        send: Send,
        settings: Settings,
        messages: Sequence[ChatMessage],
        conversation: RealtimeConversation | None,
        metadata: dict[str, str] | None,
        early: EarlyPrompt,
    ) -> None:
        self.id: Final = f"resp_{secrets.token_hex(10)}"
        self.error: OmniRelayError | None = None
        self._context = context
        self._account = account
        self._send = send
        self._settings = settings
        self._messages = messages
        self._conversation = conversation
        self._metadata = metadata
        self._early = early
        self._item = Item("assistant", [], [], status="in_progress")
        self._playback = Playback()
        self._texts: list[str] = []
        self._request_id: str | None = None
        self._item_begun = False
        self._cancelled = False
        self._reason: CancelReason = "client_cancelled"
        self._done: DoneEvent | None = None
        self._work: asyncio.Task[None] | None = None
        self._begins: asyncio.TimerHandle | None = None
        self._begun: asyncio.Task[HttpAnswer] | None = None

    @property
    def item_id(self) -> str:
        """The id of the answer's item."""
        return self._item.id

    @property
    def completed(self) -> bool:
        """Whether it was generated to its end."""
        return self._done is not None and self.error is None

    @property
    def in_conversation(self) -> bool:
        """Whether the answer is added to the conversation."""
        return self._conversation is not None

    @property
    def playback(self) -> Playback:
        """When the answer's speech is heard, and how loud it is."""
        return self._playback

    def cancel(self, reason: CancelReason = "client_cancelled") -> None:
        """Stop generating; the events that end the response are still sent."""
        self._cancelled = True
        self._reason = reason
        if self._work is not None:
            self._work.cancel()

    def begin(self, after_s: float) -> None:
        """Have the answer generated in so many seconds; :meth:`run` sends it, or :meth:`drop` cancels it."""
        self._begins = asyncio.get_running_loop().call_later(after_s, self._begin)

    def same(self, settings: Settings, messages: Sequence[ChatMessage]) -> bool:
        """Whether its answer is also one to these messages with these settings."""
        return settings == self._settings and list(messages) == list(self._messages)

    @property
    def begun(self) -> bool:
        """Whether :meth:`begin` has begun it."""
        return self._begun is not None

    def drop(self) -> None:
        """Cancel what :meth:`begin` began, or will."""
        if self._begins is not None:
            self._begins.cancel()
        if self._begun is not None:
            self._begun.cancel()
            self._begun.add_done_callback(_close)

    async def run(self) -> None:
        """Generate and send the response.

        Raises:
            ClientGoneError: The client disconnected.
        """
        try:
            await self._send("response.created", {"response": self._shown("in_progress")})
            if not self._cancelled:
                await self._answer()
        finally:
            self.drop()
        status = self._status()
        if self._item_begun:
            await self._end_item("completed" if status == "completed" else "incomplete")
        self._messages = []
        await self._send("response.done", {"response": self._shown(status)})

    async def _answer(self) -> None:
        self._work = asyncio.create_task(self._generate())
        try:
            await asyncio.wait({self._work})
        finally:
            self._work.cancel()
        if self._work.cancelled():
            return
        error = self._work.exception()
        if isinstance(error, OmniRelayError):
            limited(log).info("response %s failed: %s", self.id, error.for_log)
            self.error = error
        elif isinstance(error, ClientGoneError):
            raise error
        elif error is not None:
            log.error("response %s failed", self.id, exc_info=error)
            self.error = OmniRelayError("see the gateway's log")
        if self.error is not None:
            self._context.told(self.error)

    async def _generate(self) -> None:
        answer = await self._submitted()
        self._early.renew()
        self._request_id = answer.request_id
        try:
            await self._begin_item()
            await self._forward(answer)
        finally:
            answer.close()

    def _begin(self) -> None:
        self._begun = asyncio.create_task(self._submit())

    async def _submitted(self) -> HttpAnswer:
        if self._begins is not None:
            self._begins.cancel()
        if self._begun is not None:
            try:
                return await self._begun
            except OmniRelayError as error:
                log.debug("response %s could not be begun early: %s", self.id, error.for_log)
        return await self._submit()

    async def _submit(self) -> HttpAnswer:
        settings = self._settings
        sampling = SamplingOverrides(max_tokens=settings.max_output_tokens, temperature=settings.temperature)
        request = GenerateRequest(
            messages=list(self._messages),
            speech=settings.speech,
            speaker=settings.voice,
            text_sampling=sampling,
        )
        with named(NAMES):
            stream = await self._context.gateway.submit(request, self._account, self._early.thinker)
        return HttpAnswer(stream, NAMES)

    async def _forward(self, answer: HttpAnswer) -> None:
        audio = self._context.audio.start("pcm16", streamed=True)
        kind = "output_audio_transcript" if self._settings.speech else "output_text"
        async for event in answer:
            if isinstance(event, TextEvent):
                if event.text:
                    self._texts.append(event.text)
                    await self._send(f"response.{kind}.delta", {**self._place(), "delta": event.text})
            elif isinstance(event, AudioEvent):
                if delay := start_delay(event):
                    await self._send("response.output_audio.start_delay", {**self._place(), **delay})
                data = await audio.push(event.pcm)
                self._playback.sent(data)
                # Whole samples: each delta can be decoded by itself.
                delta = binascii.b2a_base64(data, newline=False).decode()
                self._item.audio_bytes += len(data)
                await self._send("response.output_audio.delta", {**self._place(), "delta": delta})
            elif isinstance(event, DoneEvent):
                self._done = event

    async def _begin_item(self) -> None:
        self._item_begun = True
        item = {"item": self._item.shown()}
        place = {"response_id": self.id, "output_index": 0}
        await self._send("response.output_item.added", {**place, **item})
        if self._conversation is not None:
            before = self._conversation.add(self._item)
            await self._send("conversation.item.added", {"previous_item_id": before, **item})
        await self._send("response.content_part.added", {**self._place(), "part": self._part("")})

    async def _end_item(self, status: Any) -> None:
        text = "".join(self._texts)
        kind, word = ("output_audio", "transcript") if self._settings.speech else ("output_text", "text")
        self._item.status = status
        self._item.parts = [TextPart(text)] if text else []
        self._item.content = [{"type": kind, word: text}]
        if self._settings.speech:
            await self._send("response.output_audio.done", self._place())
            end = {**self._place(), "transcript": text}
            await self._send("response.output_audio_transcript.done", end)
        else:
            await self._send("response.output_text.done", {**self._place(), "text": text})
        await self._send("response.content_part.done", {**self._place(), "part": self._part(text)})
        item = {"item": self._item.shown()}
        if self._conversation is not None:
            await self._send("conversation.item.done", item)
        await self._send("response.output_item.done", {"response_id": self.id, "output_index": 0, **item})

    def _place(self) -> dict[str, Any]:
        return {"response_id": self.id, "item_id": self._item.id, "output_index": 0, "content_index": 0}

    def _part(self, text: str) -> dict[str, str]:
        if self._settings.speech:
            return {"type": "audio", "transcript": text}
        return {"type": "text", "text": text}

    def _status(self) -> str:
        if self.error is not None:
            return "failed"
        if self._done is None:
            return "cancelled"
        return "incomplete" if finish_reason(self._done) == "length" else "completed"

    def _shown(self, status: str) -> dict[str, Any]:
        settings = self._settings
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": self._details(status),
            "output": [self._item.shown()] if self._item_begun else [],
            "conversation_id": None,
            "output_modalities": settings.modalities,
            "audio": {"output": {"format": PCM, "voice": settings.voice}},
            "max_output_tokens": settings.most,
            "metadata": self._metadata,
            "usage": usage_of(self._done, "input", "output", "token_details") if self._done else None,
            "request_id": self._request_id,
        }

    def _details(self, status: str) -> dict[str, Any] | None:
        if status == "cancelled":
            return {"type": status, "reason": self._reason}
        if status == "incomplete":
            return {"type": status, "reason": "max_output_tokens"}
        if self.error is None:
            return None
        return {"type": status, "error": body_of(self.error)["error"]}


def _close(begun: asyncio.Task[HttpAnswer]) -> None:
    """Cancel a request that was submitted before its task could be cancelled."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().close()

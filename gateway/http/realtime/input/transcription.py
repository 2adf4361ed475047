"""Transcripts of what the user said, made by the thinker beside its answers."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.access.account import ClientAccount
from gateway.http.answer import HttpAnswer, usage_of
from gateway.http.connection import ClientGoneError
from gateway.http.errors import body_of
from gateway.http.fields import convert
from gateway.http.realtime.conversation import RealtimeConversation
from gateway.http.realtime.items import Item
from gateway.http.realtime.transport import Send
from gateway.manager import Gateway
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import InvalidRequestError, OmniRelayError
from omnirelay.events import DoneEvent
from omnirelay.protocol import GenerateRequest
from shared.config.gateway import TRANSCRIPTION_PROMPT

PAUSE_S: Final = 0.1
"""An answer that follows within this time goes first."""
MAX_WAITING: Final = 64
"""Recordings of a session that wait for their transcript; the oldest are left out."""
LAST: Final = 1000
"""The least urgent priority."""
log = logging.getLogger(__name__)


class TranscriptionRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a client wants its transcripts.

    Attributes:
        model: Any name: the thinker transcribes.
        language: Ignored, because the thinker hears it, as ``languages``.
        prompt: The system message, which ``keywords`` follow.
        delay: Ignored.
    """

    model: str | None = None
    language: str | None = None
    languages: list[str] | None = None
    prompt: Annotated[str, Meta(max_length=65_536)] = ""
    keywords: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=256)] = []
    delay: str | None = None


def read_transcription(values: Any, where: str) -> TranscriptionRules | None:
    """Read what a client wants, found at ``where`` in its event; none for no transcripts.

    Raises:
        InvalidRequestError: It is invalid.
    """
    if values is None:
        return None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{where} must be an object or null", where)
    given = {name: value for name, value in values.items() if value is not None}
    return convert(given, TranscriptionRules, where)


class Transcriber:
    """Transcribes recordings of a session, one after the other and never beside an answer.  Must be closed.

    Args:
        send: Sends an event to the client.
        unanswered: Waits until no answer is generated.
    """

    def __init__(
        self,
        gateway: Gateway,
        account: ClientAccount,
        send: Send,
        conversation: RealtimeConversation,
        unanswered: Callable[[], Awaitable[None]],
    ) -> None:
        self._gateway = gateway
        self._account = account
        self._send = send
        self._conversation = conversation
        self._unanswered = unanswered
        self._waiting: deque[tuple[Item, TranscriptionRules]] = deque(maxlen=MAX_WAITING)
        self._work: asyncio.Task[None] | None = None

    def add(self, item: Item, rules: TranscriptionRules) -> None:
        """Have a recording transcribed."""
        self._waiting.append((item, rules))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._transcribe_all())

    def make_way(self) -> None:
        """An answer begins: stop, and begin again after it."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            self._work = asyncio.create_task(self._transcribe_all(self._work))

    async def close(self) -> None:
        """Stop, and transcribe nothing more."""
        work, self._work = self._work, None
        if work is not None:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        self._waiting.clear()

    async def _transcribe_all(self, before: asyncio.Task[None] | None = None) -> None:
        if before is not None:
            await asyncio.wait({before})
        try:
            while True:
                await asyncio.sleep(PAUSE_S)
                await self._unanswered()
                if not self._waiting:
                    return
                item, rules = self._waiting.popleft()
                try:
                    await self._transcribe(item, rules)
                except asyncio.CancelledError:
                    self._waiting.appendleft((item, rules))
                    raise
        except ClientGoneError:
            log.debug("the client left before its transcripts")

    async def _transcribe(self, item: Item, rules: TranscriptionRules) -> None:
        if item not in self._conversation:
            return
        place = {"item_id": item.id, "content_index": 0}
        kind = "conversation.item.input_audio_transcription"
        try:
            done = await self._ask(item, rules)
        except OmniRelayError as error:
            log.info("a transcription failed: %s", error.for_log)
            await self._send(f"{kind}.failed", {**place, "error": body_of(error)["error"]})
            return
        text = done.text.strip()
        item.content = [{"type": "input_audio", "transcript": text}]
        usage = {"type": "tokens", **usage_of(done, "input", "output", "token_details")}
        # Whole, for what was sent could not be taken back when an answer interrupts it.
        if text:
            await self._send(f"{kind}.delta", {**place, "delta": text})
        await self._send(f"{kind}.completed", {**place, "transcript": text, "usage": usage})

    async def _ask(self, item: Item, rules: TranscriptionRules) -> DoneEvent:
        messages = [ChatMessage("user", [*item.parts, TextPart(TRANSCRIPTION_PROMPT)])]
        if about := "\n".join(each for each in (rules.prompt, ", ".join(rules.keywords)) if each):
            messages.insert(0, ChatMessage("system", about))
        request = GenerateRequest(messages=messages, speech=False, priority=LAST)
        answer = HttpAnswer(await self._gateway.submit(request, self._account), {})
        try:
            async for event in answer:
                if isinstance(event, DoneEvent):
                    done = event
        finally:
            answer.close()
        return done

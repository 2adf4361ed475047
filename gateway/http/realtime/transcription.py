"""Transcripts of what the user said, made by the thinker beside its answers."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway.access.account import ClientAccount
from gateway.http.answer import HttpAnswer, usage_of_transcript
from gateway.http.connection import ClientGoneError
from gateway.http.errors import body_of
from gateway.http.realtime.conversation import EarlyPrompt, RealtimeConversation
from gateway.http.realtime.events import Send
from gateway.http.realtime.items import Item
from gateway.manager import Gateway
from omnirelay.content import ChatMessage, ContentPart, TextPart
from omnirelay.errors import BusyError, InvalidRequestError, MediaError, OmniRelayError
from omnirelay.events import DoneEvent, TextEvent
from omnirelay.protocol import GenerateRequest
from omnirelay.values import TRANSCRIPTION_PROMPT

PAUSE_S: Final = 0.1
"""An answer that follows within this time goes first."""
MAX_WAITING: Final = 64
"""Recordings of a session that wait for their transcript; the oldest fail."""
RETRY_MS: Final = 1000
LAST: Final = 1000
"""The least urgent priority."""
KIND: Final = "conversation.item.input_audio_transcription"
log = logging.getLogger(__name__)


Label = Annotated[str, Meta(max_length=128)]


class TranscriptionRules(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """How a client wants its transcripts.

    Attributes:
        model: Any name: the thinker transcribes.
        language: Ignored, because the thinker hears it, as ``languages``.
        prompt: The system message, which ``keywords`` follow.
        delay: Ignored.
    """

    model: Label | None = None
    language: Label | None = None
    languages: Annotated[list[Label], Meta(max_length=64)] | None = None
    prompt: Annotated[str, Meta(max_length=65_536)] = ""
    keywords: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=256)] = []
    delay: Label | None = None


def transcription_of(
    recording: Sequence[ContentPart], rules: TranscriptionRules, priority: int = 0
) -> GenerateRequest:
    """Return the request of a transcript."""
    messages = [ChatMessage("user", [*recording, TextPart(TRANSCRIPTION_PROMPT)])]
    if about := "\n".join(each for each in (rules.prompt, ", ".join(rules.keywords)) if each):
        messages.insert(0, ChatMessage("system", about))
    return GenerateRequest(messages=messages, speech=False, priority=priority)


@dataclass
class _Partial:
    """What was sent of the transcript of a recording that goes on."""

    item_id: str = ""
    last: str = ""
    sent: str = ""

    def new_words(self, text: str) -> str:
        """Return the words, of those on which this transcript and the last one agree, that were not sent."""
        pairs = zip(self.last.split(), text.split(), strict=False)
        whole = " ".join(word for word, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        new = whole.removeprefix(self.sent) if whole.startswith(self.sent) else ""
        self.last, self.sent = text, self.sent + new
        return new


class _Waiting(msgspec.Struct):
    """A recording that waits for its transcript.

    Attributes:
        alone: The session does nothing else: its item does not keep it, and text is sent as generated.
        sent: What was sent of its text, while it went on or before an answer interrupted it.
    """

    item: Item
    rules: TranscriptionRules
    alone: bool
    sent: str


@dataclass(eq=False)
class Transcriber:
    """Transcribes recordings of a session, one after the other and never beside an answer.  Must be closed.

    Attributes:
        _send: Sends an event to the client.
        _early: Has had the beginnings of requests computed.
        _unanswered: Waits until no answer is generated.
    """

    _gateway: Gateway
    _account: ClientAccount
    _send: Send
    _conversation: RealtimeConversation
    _early: EarlyPrompt
    _unanswered: Callable[[], Awaitable[None]]
    _waiting: deque[_Waiting] = field(default_factory=deque)
    _partial: _Partial = field(default_factory=_Partial)
    _work: asyncio.Task[None] | None = None

    async def add(self, item: Item, rules: TranscriptionRules, alone: bool) -> None:
        """Have a recording transcribed, ``alone`` if the session does nothing else."""
        sent = self._partial.sent if self._partial.item_id == item.id else ""
        self._waiting.append(_Waiting(item, rules, alone, sent))
        if alone:
            item.recording, item.parts = item.recording or item.parts, []
        if len(self._waiting) > MAX_WAITING:
            problem = f"more than {MAX_WAITING} recordings wait for their transcripts: append less at once"
            await self._fail(self._waiting.popleft(), BusyError(problem, RETRY_MS))
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._transcribe_all())

    async def look(self, item_id: str, request: GenerateRequest, thinker: str) -> None:
        """Transcribe a recording that goes on, and send the words on which two looks in a row agree.

        A client that may make so many requests only is not charged for looks: it gets none.
        """
        limited = self._account.client.limits.requests_per_second is not None
        if limited or not self._gateway.has_room(self._account):
            return
        if self._partial.item_id != item_id:
            self._partial = _Partial(item_id)
        try:
            with closing(await HttpAnswer.to(self._gateway, request, self._account, {}, thinker)) as answer:
                texts = [event.text async for event in answer if isinstance(event, TextEvent)]
            self._early.thinker = thinker
            if new := self._partial.new_words("".join(texts).strip()):
                await self._tell(item_id, "delta", delta=new)
        except OmniRelayError as error:
            log.debug("a recording that goes on was not transcribed: %s", error.for_log)
        except ClientGoneError:
            log.debug("the client left while it spoke")

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
            while self._waiting:
                if not self._waiting[0].alone:
                    await asyncio.sleep(PAUSE_S)
                    await self._unanswered()
                first = self._waiting.popleft()
                try:
                    done = await self._transcribe(first)
                except asyncio.CancelledError:
                    self._waiting.appendleft(first)
                    raise
                except OmniRelayError as error:
                    await self._fail(first, error)
                else:
                    # Beyond that cancellation: the event is sent nevertheless.
                    usage = usage_of_transcript(done)
                    await self._end(first, "completed", transcript=done.text.strip(), usage=usage)
        except ClientGoneError:
            log.debug("the client left before its transcripts")

    async def _fail(self, waiting: _Waiting, error: OmniRelayError) -> None:
        log.info("a transcription failed: %s", error.for_log)
        await self._end(waiting, "failed", error=body_of(error)["error"])

    async def _end(self, waiting: _Waiting, event: str, **fields: Any) -> None:
        if waiting.alone:
            waiting.item.recording = ()
            waiting.item.shrink_hold()
        await self._tell(waiting.item.id, event, **fields)

    async def _tell(self, item_id: str, event: str, **fields: Any) -> None:
        await self._send(f"{KIND}.{event}", {"item_id": item_id, "content_index": 0, **fields})

    async def _transcribe(self, waiting: _Waiting) -> DoneEvent:
        item = waiting.item
        if item not in self._conversation:
            raise InvalidRequestError("the item was deleted before its transcript", "item_id")
        if not (parts := item.recording or item.parts):
            raise MediaError("the recording cannot be read: the answer to it failed", "item_id")
        request = transcription_of(parts, waiting.rules, 0 if waiting.alone else LAST)
        text, near = "", self._early.thinker
        with closing(await HttpAnswer.to(self._gateway, request, self._account, {}, near)) as answer:
            self._early.renew()
            async for event in answer:
                if isinstance(event, DoneEvent):
                    done = event
                elif isinstance(event, TextEvent) and waiting.alone:
                    text = (text + event.text).lstrip()
                    await self._tell_more(waiting, text)
        text = done.text.strip()
        item.content = [{"type": "input_audio", "transcript": text}]
        if not waiting.alone:
            # Whole, for what was sent could not be taken back when an answer interrupts it.
            await self._tell_more(waiting, text)
        return done

    async def _tell_more(self, waiting: _Waiting, text: str) -> None:
        """Send what was not sent of a text, unless it has become another one."""
        if text != waiting.sent and text.startswith(waiting.sent):
            new, waiting.sent = text.removeprefix(waiting.sent), text
            await self._tell(waiting.item.id, "delta", delta=new)

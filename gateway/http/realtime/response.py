"""One response of a session, from ``response.created`` to ``response.done``."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from gateway.access.account import ClientAccount
from gateway.http.answer import HttpAnswer, finish_reason, tokens_of, usage_of
from gateway.http.connection import ClientGoneError
from gateway.http.context import HttpContext
from gateway.http.encoding.encoders import EncodedAudio
from gateway.http.encoding.g711 import G711Encoder
from gateway.http.errors import body_of
from gateway.http.realtime.audio import LAWS, Playback, SentSpeech
from gateway.http.realtime.conversation import EarlyPrompt, RealtimeConversation
from gateway.http.realtime.events import Transport
from gateway.http.realtime.items import FunctionCall, Item, Status, function_item
from gateway.http.realtime.settings import Settings
from gateway.requests.lifecycle import RequestState
from omnirelay.content import ChatMessage, TextPart
from omnirelay.errors import OmniRelayError, PromptTooLongError
from omnirelay.events import AudioEvent, DoneEvent, TextEvent
from omnirelay.protocol import GenerateRequest, SamplingOverrides
from omnirelay.tools import Call
from shared.log import limited

CancelReason = Literal["client_cancelled", "turn_detected"]
"""OpenAI's reasons of a cancelled response."""
NAMES: Final[Mapping[str, str | None]] = {
    "speaker": "audio.output.voice",
    "messages": None,
    "text_sampling.json_schema": "tools",
}
"""Names here of fields of a :class:`omnirelay.protocol.GenerateRequest`, where they differ."""
WRITTEN: Final = frozenset({RequestState.TALKING, RequestState.SYNTHESIZING})
"""States of a request whose text is complete."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Response:
    """A response to messages; its answer is added to the conversation, if one is given.

    Attributes:
        asked: The items of the conversation in the prompt; none if it has messages of its own.
        shorten: Shortens the conversation, and returns its messages; None if it cannot be shorter.
        _early: Has had the beginning of the prompt computed.
        _playback: That of the session.
        begun: :meth:`begin` has begun it.
        _silent: A call has begun: calls, and what follows them, are not spoken.
        _delay_ms: How long to wait before the first piece is played.
        _reason: Why it is cancelled; none if it is not.
        _all_written: The text with its calls is complete; the rest of the request was not needed.
    """

    _context: HttpContext
    _account: ClientAccount
    _transport: Transport
    _early: EarlyPrompt
    _playback: Playback
    _settings: Settings
    _messages: Sequence[ChatMessage]
    _conversation: RealtimeConversation | None
    _metadata: dict[str, str] | None = None
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(10)}")
    error: OmniRelayError | None = None
    begun: bool = False
    asked: Sequence[Item] = ()
    shorten: Callable[[], Awaitable[Sequence[ChatMessage] | None]] | None = None
    _silent: bool = False
    _output: list[Item] = field(default_factory=list)
    _delay_ms: int = 0
    _texts: list[str] = field(default_factory=list)
    _request_id: str | None = None
    _reason: CancelReason | None = None
    _done: DoneEvent | None = None
    _all_written: bool = False
    _work: asyncio.Task[None] | None = None
    _ahead: asyncio.Task[HttpAnswer] | None = None

    def __post_init__(self) -> None:
        self._send = self._transport.send
        self._calls = self._settings.call_parser()
        self._sent = SentSpeech(self._settings.speed)
        speech = self._sent if self._settings.speech else None
        self._item = Item("assistant", [], [], status="in_progress", speech=speech)
        # A transport that plays takes PCM.
        law = None if self._transport.plays else LAWS.get(self._settings.output_format)
        self._encoder = None if law is None else G711Encoder(law)
        spoken = self._settings.speech
        self._type, self._word = ("audio", "transcript") if spoken else ("text", "text")
        self._written = "response.output_audio_transcript" if spoken else "response.output_text"

    @property
    def item_id(self) -> str:
        """The id of the answer's item."""
        return self._item.id

    @property
    def completed(self) -> bool:
        """Whether it was generated to its end."""
        return (self._done is not None or self._all_written) and self.error is None

    @property
    def unheard(self) -> bool:
        """Whether it is to be spoken, and no speech was sent."""
        return self._settings.speech and not self._sent.size

    @property
    def in_conversation(self) -> bool:
        """Whether the answer is added to the conversation."""
        return self._conversation is not None

    def cancel(self, reason: CancelReason = "client_cancelled") -> None:
        """Stop generating; the events that end the response are still sent."""
        self._reason = reason
        if self._work is not None:
            self._work.cancel()

    def begin(self, after_s: float) -> None:
        """Have the answer generated in so many seconds; :meth:`run` sends it, or :meth:`drop` cancels it."""
        self._ahead = asyncio.create_task(self._submit_in(after_s))

    def same(self, settings: Settings, messages: Sequence[ChatMessage]) -> bool:
        """Whether its answer is also one to these messages with these settings."""
        return settings == self._settings and messages == self._messages

    def drop(self) -> None:
        """Cancel what :meth:`begin` began, or will."""
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead.add_done_callback(_close)

    async def run(self) -> None:
        """Generate and send the response.

        Raises:
            ClientGoneError: The client disconnected.
        """
        try:
            await self._send("response.created", {"response": self._shown("in_progress")})
            if self._reason is None:
                await self._answer()
        finally:
            self.drop()
            self._playback.finish()
        status = self._status()
        if self._item in self._output:
            await self._end_message("completed" if status == "completed" else "incomplete")
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
        while True:
            try:
                return await self._attempt()
            except PromptTooLongError:
                messages = None if self.shorten is None else await self.shorten()
                if messages is None:
                    raise
                self._messages, self._ahead = messages, None

    async def _attempt(self) -> None:
        with closing(await self._submitted()) as answer:
            self._early.renew()
            self._request_id = answer.request_id
            if not self._calls.names:
                await self._begin_message()
            await self._forward(answer)

    async def _submit_in(self, after_s: float) -> HttpAnswer:
        await asyncio.sleep(after_s)
        self.begun = True
        return await self._submit()

    async def _submitted(self) -> HttpAnswer:
        if self._ahead is not None:
            try:
                if self.begun:
                    return await self._ahead
                self._ahead.cancel()
            except OmniRelayError as error:
                log.debug("response %s could not be begun early: %s", self.id, error.for_log)
        return await self._submit()

    async def _submit(self) -> HttpAnswer:
        settings = self._settings
        forced = await settings.forced_call(self._context, self._account.share)
        sampling = SamplingOverrides(
            max_tokens=settings.max_output_tokens, temperature=settings.temperature, json_schema=forced
        )
        request = GenerateRequest(
            messages=list(self._messages),
            speech=settings.speech and forced is None,
            speaker=settings.voice,
            text_sampling=sampling,
            # Only what a camera has seen while the user spoke is a video here.
            use_audio_in_video=True,
        )
        gateway, near = self._context.gateway, self._early.thinker
        return await HttpAnswer.to(gateway, request, self._account, NAMES, near)

    async def _forward(self, answer: HttpAnswer) -> None:
        audio = EncodedAudio(self._context.audio, "pcm16", streamed=True, speed=self._settings.speed)
        spoken, tokens = False, 0
        async for event in answer:
            if isinstance(event, TextEvent):
                tokens += len(event.token_ids)
                await self._write(event.text)
            elif isinstance(event, DoneEvent):
                self._done = event
            elif isinstance(event, AudioEvent) and not self._silent:
                await self._begin_message()
                self._delay_ms += event.start_delay_ms
                await self._speak(await audio.push(event.pcm))
                spoken = True
            if self._silent and self._done is None and self._is_written(tokens):
                self._all_written = True
                break
        if spoken and not self._silent:
            await self._speak(await audio.finish(), last=True)
            self._sent.complete = self._done is not None and self._done.codec_finish_reason == "stop"
        await self._write("", last=True)

    async def _speak(self, pcm: bytes, last: bool = False) -> None:
        """Send a piece of the speech."""
        self._playback.sent(pcm, self._delay_ms / 1000)
        self._sent.push(pcm)
        audio = pcm if self._encoder is None else self._encoder.push(pcm)
        if self._encoder is not None and last:
            audio += self._encoder.finish()
        if audio:
            delay_ms, self._delay_ms = self._delay_ms, 0
            await self._transport.send_audio(self._place(), audio, delay_ms)

    def _is_written(self, tokens: int) -> bool:
        """Whether so many text tokens are all."""
        report = self._context.gateway.report(self._request_id or "")
        return report is not None and report.state in WRITTEN and report.text_tokens == tokens

    async def _write(self, text: str, last: bool = False) -> None:
        """Send a piece of the text, and the calls in it."""
        found = self._calls.push(text, last)
        self._silent = self._silent or self._calls.begun
        for each in found:
            if isinstance(each, Call):
                await _whole(self._call(each))
            else:
                await self._begin_message()
                self._texts.append(each)
                await self._send(f"{self._written}.delta", {**self._place(), "delta": each})

    async def _call(self, call: Call) -> None:
        """Send a call, and make it an item of the conversation."""
        function = FunctionCall(name=call.name, arguments=call.arguments)
        item = function_item(function)
        item.status = "in_progress"
        await self._add(item)
        place = {**self._of(item), "item_id": item.id, "call_id": function.call_id}
        arguments = {"name": call.name, "arguments": call.arguments}
        await self._send("response.function_call_arguments.delta", {**place, "delta": call.arguments})
        await self._send("response.function_call_arguments.done", {**place, **arguments})
        item.status = "completed"
        await self._end(item)

    async def _begin_message(self) -> None:
        """Begin the message, unless it has begun."""

        async def begin() -> None:
            await self._add(self._item)
            await self._send("response.content_part.added", {**self._place(), "part": self._part("")})

        if self._item not in self._output:
            await _whole(begin())

    async def _end_message(self, status: Status) -> None:
        text = "".join(self._texts)
        self._item.status = status
        self._item.parts = [TextPart(text)] if text else []
        self._item.content = [{"type": f"output_{self._type}", self._word: text}]
        place = self._place()
        if self._settings.speech:
            await self._send("response.output_audio.done", place)
        await self._send(f"{self._written}.done", {**place, self._word: text})
        await self._send("response.content_part.done", {**place, "part": self._part(text)})
        await self._end(self._item)

    async def _add(self, item: Item) -> None:
        """Begin an item of the output."""
        before = None if self._conversation is None else self._conversation.add(item)
        self._output.append(item)
        shown = {"item": item.shown()}
        await self._send("response.output_item.added", {**self._of(item), **shown})
        if self._conversation is not None:
            await self._send("conversation.item.added", {"previous_item_id": before, **shown})

    async def _end(self, item: Item) -> None:
        shown = {"item": item.shown()}
        if self._conversation is not None and item in self._conversation:
            await self._send("conversation.item.done", shown)
        await self._send("response.output_item.done", {**self._of(item), **shown})

    def _of(self, item: Item) -> dict[str, Any]:
        """The place of an item in the output."""
        return {"response_id": self.id, "output_index": self._output.index(item)}

    def _place(self) -> dict[str, Any]:
        """The place of the message's only part."""
        return {**self._of(self._item), "item_id": self._item.id, "content_index": 0}

    def _part(self, text: str) -> dict[str, str]:
        return {"type": self._type, self._word: text}

    def _status(self) -> str:
        if self.error is not None:
            return "failed"
        if self._done is None:
            return "completed" if self._all_written else "cancelled"
        return "incomplete" if finish_reason(self._done) == "length" else "completed"

    def _shown(self, status: str) -> dict[str, Any]:
        fields = self._settings.fields()
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": self._details(status),
            "output": [item.shown() for item in self._output],
            "conversation_id": None,
            "output_modalities": fields["output_modalities"],
            "audio": {"output": fields["audio"]["output"]},
            "max_output_tokens": fields["max_output_tokens"],
            "metadata": self._metadata,
            "usage": None if status == "in_progress" else self._usage(),
            "request_id": self._request_id,
        }

    def _usage(self) -> dict[str, Any]:
        if self._done is not None:
            return usage_of(self._done, "input", "output", "token_details")
        report = self._context.gateway.report(self._request_id or "")
        prompt, text, codec = (
            (report.prompt_tokens, report.text_tokens, report.codec_tokens) if report else (0, 0, 0)
        )
        return {
            **tokens_of(prompt, text + codec, "input", "output"),
            "input_token_details": {},
            "output_token_details": {"text_tokens": text, "audio_tokens": codec},
        }

    def _details(self, status: str) -> dict[str, Any] | None:
        if status == "cancelled":
            return {"type": status, "reason": self._reason or "client_cancelled"}
        if status == "incomplete":
            return {"type": status, "reason": "max_output_tokens"}
        if self.error is None:
            return None
        return {"type": status, "error": body_of(self.error)["error"]}


async def _whole(events: Coroutine[Any, Any, None]) -> None:
    """Send events that belong together: all of them, even if the caller is cancelled meanwhile."""
    sending = asyncio.create_task(events)
    try:
        await asyncio.shield(sending)
    finally:
        await asyncio.wait({sending})


def _close(begun: asyncio.Task[HttpAnswer]) -> None:
    """Cancel a request that was submitted before its task could be cancelled."""
    if not begun.cancelled() and begun.exception() is None:
        begun.result().close()

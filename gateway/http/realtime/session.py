"""A session: settings, conversation, and what the client's events change."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from gateway.access.account import ClientAccount
from gateway.http.body import parsed, size_of
from gateway.http.context import HttpContext
from gateway.http.errors import body_of
from gateway.http.fields import convert_given
from gateway.http.realtime import events
from gateway.http.realtime.audio import HEADER_BYTES, Playback, milliseconds
from gateway.http.realtime.conversation import EarlyPrompt, RealtimeConversation
from gateway.http.realtime.events import Transport
from gateway.http.realtime.input_buffers import InputAudio, InputVideo
from gateway.http.realtime.items import Item, Recorded, new_item_id, new_session_id, read_item, sound_item
from gateway.http.realtime.response import CancelReason, Response
from gateway.http.realtime.responses import IdleTimer, Responses
from gateway.http.realtime.settings import Settings, changed_settings, refuse, shown_warnings, split
from gateway.http.realtime.transcription import Transcriber, TranscriptionRules, transcription_of
from gateway.http.realtime.turn_detection import SemanticVad, Turn, TurnListener, VoicePool
from omnirelay.content import AudioPart, ChatMessage, ContentPart
from omnirelay.errors import (
    EmptyAudioError,
    InvalidRequestError,
    MediaError,
    OmniRelayError,
    RetrievedItemError,
    SlowClientError,
    TruncatedItemError,
    UnsupportedError,
)
from omnirelay.protocol import PIECE_BYTES, GenerateRequest

IDLE_UNIT_S: Final = 0.001
"""Of ``idle_timeout_ms``; shorter in tests."""
LEAST_MS: Final = 100
"""Of audio that a client commits, as OpenAI's: the thinker reads no recording below 30 ms."""


@dataclass(eq=False)
class Session:
    """One client's session.  Must be closed.

    Attributes:
        too_slow: Set when the connection must be closed because the client reads too slowly.
        _paused: Where the last turn that was answered early begins and ends, and its recording: the item of
            the turn has the same, so that the answer is known to be one to it.
        _changing: Events of the client, and the time without any, change the session one after the other.
    """

    _context: HttpContext
    _account: ClientAccount
    _transport: Transport
    _client: str
    _voices: VoicePool
    _settings: Settings
    id: str = field(default_factory=new_session_id)
    too_slow: asyncio.Event = field(default_factory=asyncio.Event)
    _playback: Playback = field(default_factory=Playback)
    _listener: TurnListener | None = None
    _idle: IdleTimer = field(default_factory=IdleTimer)
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _paused: tuple[tuple[int, int], Recorded] | None = None
    _heard: bool = False

    def __post_init__(self) -> None:
        gateway, account = self._context.gateway, self._account
        media, share = account.client.media(self._context.config.media), account.share
        self._send = self._transport.send
        self._conversation = RealtimeConversation(media, gateway.held.of(share))
        self._audio = InputAudio(media, gateway.held.of(share))
        self._video = InputVideo(media, gateway.held.of(share))
        self._early = EarlyPrompt(gateway, account, self._client)
        self._response = partial(
            Response, self._context, account, self._transport, self._early, self._playback
        )
        self._count = gateway.metrics.turn
        self._responses = Responses(self._count, self._answered)
        self._transcriber = Transcriber(
            gateway, account, self._send, self._conversation, self._early, self._responses.ended
        )
        self._set_listener()

    @property
    def _answers(self) -> bool:
        """Whether turns that have ended are answered."""
        turns = self._settings.turns
        return turns is not None and turns.create_response and self._settings.kind == "realtime"

    @property
    def answering(self) -> bool:
        """Whether a response is being generated."""
        return self._responses.running

    def busy(self) -> bool:
        """Whether a response is being generated, or the user has spoken since the last call."""
        heard, self._heard = self._heard, False
        return heard or self.answering

    async def begin(self, told: dict[str, Any] | None = None) -> None:
        """Send ``session.created``, with further fields."""
        await self._send("session.created", {**self._shown(), **(told or {})})

    async def receive(self, text: str | None) -> None:
        """Process a client's message, which is none if it was not text; its errors are sent back.

        Raises:
            ClientGoneError: The client disconnected.
        """
        context, share = self._context, self._account.share
        event_id, hold = None, context.gateway.held.of(share)
        try:
            if text is None:
                raise InvalidRequestError("events must be text messages, not binary ones")
            hold.grow(size_of(text) if len(text) > PIECE_BYTES else 0)
            event_id, event = await parsed(context, share, events.read_event, text)
            if isinstance(event, InvalidRequestError):
                raise event
            await self.handle(event)
        except OmniRelayError as error:
            await self.tell(error, event_id)
        finally:
            hold.release()

    async def handle(self, event: events.ClientEvent) -> None:
        """Process an event.

        Raises:
            OmniRelayError: It is refused; the session goes on.
            ClientGoneError: The client disconnected.
        """
        async with self._changing:
            await self._handle(event)

    async def _handle(self, event: events.ClientEvent) -> None:
        match event:
            case events.AppendAudio():
                # A transport that plays records, too, and gives PCM.
                name = "audio/pcm" if self._transport.plays else self._settings.input_format
                await self._audio.append(event.audio, name)
                await self._listen()
            case events.CommitAudio():
                await self._commit()
            case events.ClearAudio():
                self._audio.clear()
                self._early.stop()
                self._responses.drop_early()
                self._paused = None
                if self._listener is not None:
                    self._listener.reset()
                await self._send("input_audio_buffer.cleared", {})
            case events.AppendVideo() | events.ClearVideo():
                await self._see(event)
            case events.RetrieveItem():
                item = self._conversation.get(event.item_id, RetrievedItemError)
                await self._send("conversation.item.retrieved", {"item": item.shown()})
            case events.CreateResponse():
                await self._respond(event.response or {})
            case events.CancelResponse():
                await self._responses.cancel(event.response_id)
            case events.SessionUpdate():
                warnings: list[UnsupportedError] = []
                self._settings = await self._changed(event.session, "session", warnings.append)
                self._set_listener()
                await self._send("session.updated", {**self._shown(), "warnings": shown_warnings(warnings)})
            case _:
                await self._edit(event)

    async def tell(self, error: OmniRelayError, event_id: str | None) -> None:
        """Send an error; the session goes on."""
        self._context.told(error)
        await self._send("error", {"error": {**body_of(error)["error"], "event_id": event_id}})

    async def close(self) -> None:
        """Cancel the response, and release all memory."""
        await self._idle.close()
        await self._responses.close()
        await self._transcriber.close()
        self._early.stop()
        self._audio.clear()
        self._video.clear()
        self._conversation.clear()

    async def _see(self, event: events.AppendVideo | events.ClearVideo) -> None:
        if isinstance(event, events.ClearVideo):
            self._video.clear()
            self._paused = None
            await self._send("input_video_buffer.cleared", {})
        elif self._settings.kind == "transcription":
            raise UnsupportedError("a session of transcription sees nothing: append audio alone", "type")
        else:
            taken_ms = self._video.time_of(event.time_ms, milliseconds(self._audio.end))
            self._video.append(event.image, taken_ms)
            if self._paused is not None and taken_ms <= milliseconds(self._paused[0][1]):
                # Of the time of the recording, which has not got it.
                self._paused = None

    async def _edit(self, event: events.ClientEvent) -> None:
        if isinstance(event, events.CreateItem):
            item = await asyncio.to_thread(read_item, event.item, "item", self._settings.input_format)
            await self._added(item, self._conversation.add(item, event.previous_item_id))
        elif isinstance(event, events.DeleteItem):
            self._conversation.remove(event.item_id)
            await self._send("conversation.item.deleted", {"item_id": event.item_id})
        elif isinstance(event, events.ClearOutput):
            if not self._transport.plays:
                raise UnsupportedError("over a WebSocket the client plays the speech", "type")
            await self._cut("client_cancelled")
        elif isinstance(event, events.TruncateItem):
            current = self._responses.current
            if current is not None and current.item_id == event.item_id:
                await self._responses.interrupt()
            await self._truncate(event.item_id, event.content_index, event.audio_end_ms)

    async def _truncate(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        self._conversation.get(item_id, TruncatedItemError).truncate(content_index, audio_end_ms)
        told = {"content_index": content_index, "audio_end_ms": audio_end_ms}
        await self._send("conversation.item.truncated", {"item_id": item_id, **told})

    async def _cut(self, reason: CancelReason, response: bool = True) -> None:
        """Stop what is being played, cancel the response if asked to, and keep what was heard."""
        cut = self._transport.stop_audio()
        current = self._responses.current if response and self.answering else None
        if response:
            self._playback.stop()
            await self._responses.interrupt(reason)
        for place, ms in cut:
            await self._send("output_audio_buffer.cleared", {"response_id": place["response_id"]})
            await self._forget_unheard(place["item_id"], ms)
        if self._transport.plays and current is not None and current.unheard:
            await self._forget_unheard(current.item_id, 0)

    async def _forget_unheard(self, item_id: str, ms: int) -> None:
        # The client may have deleted it, or cut it where less was heard.
        with suppress(InvalidRequestError):
            await self._truncate(item_id, 0, ms)

    def _set_listener(self) -> None:
        """Detect turns as the settings say."""
        rules = self._settings.turns
        if rules is None or rules.idle_timeout_ms is None:
            self._idle.stop()
        if rules is None:
            self._listener = None
            self._responses.drop_early()
        elif self._listener is not None:
            self._listener.tracker.rules = rules
        else:
            spent = self._context.gateway.metrics.turn_detection.inc
            self._listener = TurnListener(
                rules, self._audio, self._voices, self._client, spent, self._playback
            )

    async def _listen(self) -> None:
        """Act on what was appended."""
        listener = self._listener
        if listener is not None:
            async for turn in listener.turns():
                self._heard = True
                self._idle.spoken()
                match turn.change:
                    case "started":
                        await self._turn_started(turn, listener.tracker.rules.interrupt_response)
                    case "paused":
                        await self._answer_early(turn, self._answers)
                    case "resumed":
                        self._responses.drop_early()
                        self._paused = None
                    case "stopped":
                        await self._turn_stopped(turn, self._answers)
        # Before a turn begins, what is sure of it is nothing; an answer that is spoken may yet be cut short.
        begins = listener is None or listener.tracker.speaking
        if begins and not self.answering and not self._responses.has_early:
            # Without turn detection most of the audio may be silence, in which words would be heard.
            looks = listener is not None and self._settings.kind == "transcription"
            look = partial(self._transcriber.look, listener.item_id) if listener and looks else None
            self._early.heard(self._audio.size, self._heard_so_far, look)

    async def _turn_started(self, turn: Turn, interrupts: bool) -> None:
        self._count("started")
        told = {"audio_start_ms": turn.ms, "item_id": turn.item_id}
        await self._send("input_audio_buffer.speech_started", told)
        if interrupts:
            # Of a response outside the conversation nobody waits for the end: an answer may play beside it.
            current = self._responses.current
            aside = self.answering and current is not None and not current.in_conversation
            if self.answering and not aside:
                self._count("interrupted")
            await self._cut("turn_detected", response=not aside)

    async def _answer_early(self, turn: Turn, answers: bool) -> None:
        """Begin to answer a turn that may have ended."""
        if not answers or self.answering or not self._context.gateway.has_room(self._account):
            return
        wav = memoryview(self._audio.so_far(turn.position))
        recorded = await self._recorded(wav, milliseconds(self._audio.begin))
        self._paused = (self._audio.begin, turn.position), recorded
        asked = self._asked(recorded.parts)
        self._responses.start_early(self._response(self._settings, asked.messages, self._conversation))

    async def _turn_stopped(self, turn: Turn, answers: bool) -> None:
        self._count("stopped")
        told = {"audio_end_ms": turn.ms, "item_id": turn.item_id}
        await self._send("input_audio_buffer.speech_stopped", told)
        self._early.stop()
        try:
            await self._add_audio(turn.item_id, turn.position)
            if answers and not self.answering:
                await self._respond({})
        finally:
            # Unless it has become the answer.
            self._responses.drop_early()

    async def _idled(self) -> None:
        """The user has said nothing since the last answer: have the silence answered."""
        async with self._changing:
            listener = self._listener
            if listener is None or listener.tracker.speaking or self.answering or not self._audio.size:
                return
            self._count("timed_out")
            item_id, begin, end = listener.item_id, self._audio.begin, self._audio.end
            end -= (end - begin) % 2
            times = {"audio_start_ms": milliseconds(begin), "audio_end_ms": milliseconds(end)}
            await self._send("input_audio_buffer.timeout_triggered", {**times, "item_id": item_id})
            try:
                await self._add_audio(item_id, end)
                await self._respond({})
            except OmniRelayError as error:
                await self.tell(error, None)

    async def _commit(self) -> None:
        """Make an item of the input audio; it interrupts a response."""
        listener = self._listener
        if listener is not None and not listener.tracker.speaking and self._settings.kind == "transcription":
            # What is kept of the silence between turns would be heard as words.
            raise EmptyAudioError(
                "the input audio buffer has no speech since the last turn: nothing is committed"
            )
        if (ms := milliseconds(self._audio.size)) < LEAST_MS and self._audio.size:
            raise EmptyAudioError(
                f"the input audio buffer has {ms} ms of audio: append {LEAST_MS} ms at least"
            )
        item_id = new_item_id() if listener is None else listener.item_id
        self._responses.drop_early()
        await self._add_audio(item_id, interrupts=True)

    async def _add_audio(self, item_id: str, end: int | None = None, interrupts: bool = False) -> None:
        """Make an item of the input audio, up to a position."""
        begin, (paused, self._paused) = self._audio.begin, (self._paused, None)
        wav, hold = self._audio.commit(end)
        if self._listener is not None and self._audio.size < 2:
            # Also if what was taken is refused: it is not there any more.
            self._listener.reset()
        self._early.stop()
        try:
            if interrupts:
                await self._responses.interrupt()
            if paused is not None and paused[0] == (begin, end):
                recorded = paused[1]
            else:
                recorded = await self._recorded(memoryview(wav), milliseconds(begin))
            item = sound_item(wav, item_id, recorded)
            before = self._conversation.add(item, hold=hold)
        except BaseException:
            hold.release()
            raise
        told = {"previous_item_id": before, "item_id": item.id}
        await self._send("input_audio_buffer.committed", told)
        await self._added(item, before)
        if (rules := self._settings.transcripts) is not None:
            await self._transcriber.add(item, rules, alone=self._settings.kind == "transcription")

    async def _added(self, item: Item, before: str | None) -> None:
        told = {"previous_item_id": before, "item": item.shown()}
        await self._send("conversation.item.added", told)
        await self._send("conversation.item.done", told)
        # Not before: the item may be the oldest, or come behind one that is deleted.
        await self._tell_deleted(self._conversation.make_room())
        if not self.answering and self._settings.kind == "realtime":
            self._early.added(self._prompt)

    async def _tell_deleted(self, items: Sequence[Item]) -> None:
        for item in items:
            await self._send("conversation.item.deleted", {"item_id": item.id})

    async def _respond(self, values: dict[str, Any]) -> None:
        if self._settings.kind == "transcription":
            raise UnsupportedError(
                "a session of transcription answers nothing: open one without intent", "type"
            )
        own, changes = split(values, events.ResponseOptions.__struct_fields__)
        options: events.ResponseOptions = convert_given(own, events.ResponseOptions, "response")
        settings = await self._changed(changes, "response", refuse)
        # Refused before anything is interrupted.
        await settings.forced_call(self._context, self._account.share)
        given = None
        if options.input is not None:
            given = await self._conversation.read(options.input, self._settings.input_format)
        self._idle.stop()
        await self._responses.interrupt()
        await self._tell_deleted(self._conversation.make_room())
        self._early.stop()
        messages = self._instructed(self._conversation.messages() if given is None else given, settings)
        added = self._conversation if options.conversation == "auto" else None
        # A response with options of its own has not been begun early.
        early = None if values else self._responses.take_early(settings, messages)
        self._responses.drop_early()
        self._transcriber.make_way()
        response = early or self._response(settings, messages, added, options.metadata)
        if given is None:
            response.asked = self._conversation.asked()
            response.shorten = partial(self._shortened, settings)
        self._responses.start(response)

    async def _shortened(self, settings: Settings) -> list[ChatMessage] | None:
        deleted = self._conversation.shorten()
        if deleted is None:
            return None
        await self._tell_deleted(deleted)
        return self._instructed(self._conversation.messages(), settings)

    def _answered(self, response: Response) -> None:
        if isinstance(response.error, SlowClientError):
            self.too_slow.set()
        for item in response.asked:
            item.answered = item.answered or response.completed
            if isinstance(response.error, MediaError) and not item.answered:
                # One of them cannot be read, and would make all further answers fail.
                item.forget_media()
        rules = self._settings.turns
        if rules is not None and rules.idle_timeout_ms is not None and response.completed:
            self._idle.start(self._playback.heard_until, rules.idle_timeout_ms * IDLE_UNIT_S, self._idled)

    def _prompt(self) -> GenerateRequest:
        """Return what a response would ask now."""
        messages = self._instructed(self._conversation.messages(), self._settings)
        return GenerateRequest(messages=messages, speech=self._settings.speech, use_audio_in_video=True)

    async def _recorded(self, wav: memoryview, begin_ms: int) -> Recorded:
        """Return a recording that began at a time, with what was seen meanwhile."""
        if not self._video.sees(begin_ms + milliseconds(len(wav) - HEADER_BYTES)):
            return Recorded([AudioPart(data=wav)])
        # Megabytes are copied.
        return await asyncio.to_thread(self._video.recorded, wav, begin_ms)

    async def _heard_so_far(self) -> GenerateRequest:
        wav = memoryview(self._audio.so_far())
        return self._asked((await self._recorded(wav, milliseconds(self._audio.begin))).parts)

    def _asked(self, parts: Sequence[ContentPart]) -> GenerateRequest:
        if self._settings.kind == "transcription":
            return transcription_of(parts, self._settings.transcripts or TranscriptionRules())
        request = self._prompt()
        request.messages.append(ChatMessage("user", parts))
        return request

    def _instructed(self, messages: list[ChatMessage], settings: Settings) -> list[ChatMessage]:
        return settings.instructed(messages, self._context.gateway.validator.speech_system_prompt)

    async def _changed(
        self, values: dict[str, Any], where: str, unavailable: Callable[[UnsupportedError], None]
    ) -> Settings:
        share = self._account.share
        return await changed_settings(self._context, share, self._settings, values, where, unavailable)

    def _shown(self) -> dict[str, Any]:
        """Return the session, and how the end of a turn is found, where both ways are possible."""
        shown = {"session": self._settings.shown(self.id, self._context.model)}
        if not isinstance(self._settings.turns, SemanticVad):
            return shown
        return {**shown, "end_of_turn": "silence" if self._voices.end is None else "model"}

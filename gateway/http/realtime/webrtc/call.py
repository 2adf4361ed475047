"""One call, from its answer to its end: events on its data channel, speech on its track."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import msgspec
from aiortc import InvalidStateError, MediaStreamTrack, RTCDataChannel
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame, AudioResampler

from gateway.http.connection import ClientGoneError, received
from gateway.http.realtime.audio import BYTES_PER_S, milliseconds
from gateway.http.realtime.events import AppendAudio, Played, Transport
from gateway.http.realtime.session import Session
from gateway.http.realtime.webrtc.peer import Peer
from gateway.requests.metrics import CallEnd
from omnirelay.errors import OmniRelayError
from omnirelay.tasks import first_of
from shared.http.protocol import STALL_S
from shared.messages import SAMPLE_RATE

log = logging.getLogger(__name__)


FRAME_S: Final = 0.02
FRAME_SAMPLES: Final = int(SAMPLE_RATE * FRAME_S)
FRAME_BYTES: Final = 2 * FRAME_SAMPLES
LATE_S: Final = 0.2
"""Frames that are later than this are not sent at once: the clock goes on from now."""
AHEAD_BYTES: Final = 30 * BYTES_PER_S
"""Speech that may wait to be sent."""
SILENCE: Final = bytes(FRAME_BYTES)


@dataclass
class _Answer:
    place: dict[str, Any]
    begins: float
    pcm: bytearray = field(default_factory=bytearray)
    sent: int = 0
    complete: bool = False


class SpeechTrack(MediaStreamTrack):
    """A track of frames of 20 ms, silent between answers; aiortc resamples and encodes them on a thread.

    Args:
        tell: Called with type and fields of the events that say what is being played.
    """

    kind = "audio"

    def __init__(self, tell: Callable[[str, dict[str, Any]], None]) -> None:
        super().__init__()
        self._tell = tell
        self._answers: deque[_Answer] = deque()
        self._room = asyncio.Event()
        self._due: float | None = None
        self._pts = 0

    async def push(self, place: dict[str, Any], pcm: bytes, delay_s: float) -> None:
        """Append speech of the answer of ``place``, once there is room; the first waits for ``delay_s``."""
        answer = self._of(place)
        if answer is None:
            answer = _Answer(place, asyncio.get_running_loop().time() + delay_s)
            self._answers.append(answer)
        answer.pcm += pcm
        while sum(len(each.pcm) for each in self._answers) > AHEAD_BYTES:
            self._room.clear()
            await self._room.wait()

    def finish(self, place: dict[str, Any]) -> None:
        """No more comes of an answer."""
        answer = self._of(place)
        if answer is not None:
            answer.complete = True

    def clear(self) -> list[Played]:
        """Drop what was not sent, and return what was sent of those answers."""
        cut = [Played(each.place, milliseconds(each.sent)) for each in self._answers]
        self._answers.clear()
        self._room.set()
        return cut

    async def recv(self) -> AudioFrame:
        """Return the next frame when it is due; aiortc calls it."""
        if self.readyState != "live":
            raise MediaStreamError
        now = asyncio.get_running_loop().time()
        if self._due is None or self._due < now - LATE_S:
            self._due = now
        await asyncio.sleep(max(0.0, self._due - now))
        self._due += FRAME_S
        frame = AudioFrame(format="s16", layout="mono", samples=FRAME_SAMPLES)
        frame.planes[0].update(self._next())
        frame.sample_rate = SAMPLE_RATE
        frame.time_base = Fraction(1, SAMPLE_RATE)
        frame.pts = self._pts
        self._pts += FRAME_SAMPLES
        return frame

    def _next(self) -> bytes:
        """Take a frame of the first answer; one that is not whole is its last."""
        while self._answers:
            answer = self._answers[0]
            if len(answer.pcm) < FRAME_BYTES and not answer.complete:
                return SILENCE
            if asyncio.get_running_loop().time() < answer.begins:
                return SILENCE
            told = {"response_id": answer.place["response_id"]}
            if not answer.sent and answer.pcm:
                self._tell("output_audio_buffer.started", told)
            data = bytes(answer.pcm[:FRAME_BYTES])
            del answer.pcm[:FRAME_BYTES]
            answer.sent += len(data)
            if not answer.pcm and answer.complete:
                self._answers.popleft()
                if answer.sent:
                    self._tell("output_audio_buffer.stopped", told)
            self._room.set()
            if data:
                return data.ljust(FRAME_BYTES, b"\0")
        return SILENCE

    def _of(self, place: dict[str, Any]) -> _Answer | None:
        return next((each for each in self._answers if each.place == place), None)


MAX_UNREAD: Final = 2**20
"""Bytes of events that wait for the client to read."""


class CallTransport(Transport):
    """Sends events on a data channel, and speech on a track.

    Attributes:
        track: The speech that goes to the client.
        stalled: The client has read no event for too long.
    """

    plays = True

    def __init__(self) -> None:
        super().__init__(self._send_in_time)
        self.track: Final = SpeechTrack(self._tell)
        self._channel: RTCDataChannel | None = None
        self._end: Callable[[], None] = lambda: None
        self._read = asyncio.Event()
        self._events = 0
        self.stalled = False

    def open(self, channel: RTCDataChannel, end: Callable[[], None]) -> None:
        """Send events on a channel, which is open; ``end`` ends the call if they are not read."""
        self._channel, self._end = channel, end
        channel.bufferedAmountLowThreshold = MAX_UNREAD // 2
        channel.on("bufferedamountlow", self._read.set)

    async def _send_in_time(self, kind: str, fields: dict[str, Any]) -> None:
        """Send an event, once there is room for it.

        Raises:
            ClientGoneError: The client disconnected, or reads nothing.
        """
        if kind == "response.output_audio.done":
            self.track.finish(fields)
        self._send(kind, fields)
        while self._channel is not None and self._channel.bufferedAmount > MAX_UNREAD:
            self._read.clear()
            try:
                async with asyncio.timeout(STALL_S):
                    await self._read.wait()
            except TimeoutError as error:
                log.info("a call ends: its client has read no event for %g s", STALL_S)
                self.stalled = True
                self._end()
                raise ClientGoneError from error

    async def send_audio(self, place: dict[str, Any], pcm: bytes, start_delay_ms: int) -> None:
        """Append it to the track."""
        await self.track.push(place, pcm, start_delay_ms / 1000)

    def stop_audio(self) -> list[Played]:
        """Clear the track."""
        return self.track.clear()

    def _send(self, kind: str, fields: dict[str, Any]) -> None:
        if self._channel is None:
            raise ClientGoneError
        self._events += 1
        event = {"type": kind, "event_id": f"event_{self._events:x}", **fields}
        try:
            self._channel.send(msgspec.json.encode(event).decode())
        except InvalidStateError as error:
            raise ClientGoneError from error
        except ValueError:
            # The client announces the largest message that it takes.
            log.info("an event of type %s is larger than the client takes, and is left out", kind)

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Send an event of the track, which cannot wait."""
        try:
            self._send(kind, fields)
        except ClientGoneError:
            log.debug("%s was not sent: the client disconnected", kind)


CONNECT_S: Final = 15.0
"""Time for ICE, DTLS and the data channel, after the answer."""
IDLE_S: Final = 600.0
"""Time without an event of the client, without speech that turn detection hears, and without an answer."""
FAST_S: Final = 10.0
"""How much audio a client may send more than the time that has passed."""


@dataclass(eq=False)
class Call:
    """A session whose client is connected by WebRTC.

    Attributes:
        holder: Whose quota it uses.
        _open_session: Opens the session, once the client is connected.
        _longest_s: Time limit of the call.
    """

    id: str
    holder: str
    _peer: Peer
    _transport: CallTransport
    _open_session: Callable[[], Session]
    _longest_s: float

    async def run(self) -> CallEnd:
        """Hold the call until one side hangs up, or a limit is reached; the peer must be closed then."""
        watching = asyncio.create_task(self._peer.watch())
        watching.add_done_callback(lambda _: self._peer.end())
        end: CallEnd = "hung_up"
        try:
            async with asyncio.timeout(CONNECT_S):
                channel = await self._peer.opened
            self._transport.open(channel, self._peer.end)
            end = await self._converse()
        except TimeoutError:
            log.info("%s ends: its client did not connect within %g s", self.id, CONNECT_S)
            end = "unconnected"
        except ClientGoneError:
            log.debug("the client of %s disconnected", self.id)
        finally:
            watching.cancel()
        return "too_slow" if self._transport.stalled else end

    def hang_up(self) -> None:
        """End the call."""
        self._peer.end()

    async def _converse(self) -> CallEnd:
        async def ended(end: CallEnd, work: Awaitable[object]) -> CallEnd:
            await work
            return end

        session = self._open_session()
        try:
            await session.begin()
            return await first_of(
                ended("time_limit", self._handle(session)),
                ended("hung_up", self._peer.gone.wait()),
                ended("too_slow", session.too_slow.wait()),
                ended("too_fast", self._hear(session)),
                ended("time_limit", self._expire()),
            )
        finally:
            await session.close()

    async def _handle(self, session: Session) -> None:
        """Process the client's events, until there are none, and nothing is said, for too long."""
        while True:
            try:
                text = await received(self._peer.message, IDLE_S, session.busy)
            except TimeoutError:
                log.info("%s ends: no event, and nothing said, for %.0f s", self.id, IDLE_S)
                return
            await session.receive(text)

    async def _expire(self) -> None:
        await asyncio.sleep(self._longest_s)
        log.info("%s ends: it has lasted %.0f s (gateway.webrtc.max_call_s)", self.id, self._longest_s)

    async def _hear(self, session: Session) -> None:
        """Append what the client says to the session's input, until it sends faster than anybody speaks."""
        loop = asyncio.get_running_loop()
        resampler = AudioResampler("s16", "mono", SAMPLE_RATE)
        begun, heard_s, refused = loop.time(), 0.0, False
        while self._peer.voice is not None and (frame := await _frame(self._peer.voice)) is not None:
            heard_s += frame.samples / frame.sample_rate
            if heard_s > loop.time() - begun + FAST_S:
                log.info("%s ends: its client sends audio faster than it is spoken", self.id)
                return
            data = b"".join(each.to_ndarray().tobytes() for each in resampler.resample(frame))
            try:
                await session.handle(AppendAudio(audio=data))
                refused = False
            except OmniRelayError as error:
                # Once, not for every frame.
                if not refused:
                    await session.tell(error, None)
                refused = True
        await asyncio.Event().wait()


async def _frame(track: MediaStreamTrack) -> AudioFrame | None:
    """Wait for the next frame; none if the track has ended."""
    try:
        frame = await track.recv()
    except MediaStreamError:
        return None
    return frame if isinstance(frame, AudioFrame) else None

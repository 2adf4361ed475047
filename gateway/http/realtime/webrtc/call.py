"""One call, from its answer to its end."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError
from av import AudioFrame, AudioResampler

from gateway.http.connection import ClientGoneError
from gateway.http.realtime.events import AppendAudio
from gateway.http.realtime.opening.sessions import receive
from gateway.http.realtime.session import Session
from gateway.http.realtime.webrtc.peer import Peer
from gateway.http.realtime.webrtc.transport import CallTransport
from gateway.requests.metrics import CallEnd
from omnirelay.errors import OmniRelayError
from shared.messages import SAMPLE_RATE

CONNECT_S: Final = 15.0
"""Time for ICE, DTLS and the data channel, after the answer."""
IDLE_S: Final = 600.0
"""Time without an event of the client and without an answer."""
FAST_S: Final = 10.0
"""How much audio a client may send more than the time that has passed."""
log = logging.getLogger(__name__)


class Call:
    """A session whose client is connected by WebRTC.

    Args:
        open_session: Opens the session, once the client is connected.
        longest_s: Time limit of the call.
    """

    def __init__(
        self,
        name: str,
        peer: Peer,
        transport: CallTransport,
        open_session: Callable[[], Session],
        longest_s: float,
    ) -> None:
        self.id: Final = name
        self._peer = peer
        self._transport = transport
        self._open_session = open_session
        self._longest_s = longest_s
        self._active = 0.0

    async def run(self) -> CallEnd:
        """Hold the call until one side hangs up, or a limit is reached; then everything is free."""
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
            await self._peer.close()
        return "too_slow" if self._transport.stalled else end

    def hang_up(self) -> None:
        """End the call."""
        self._peer.end()

    async def _converse(self) -> CallEnd:
        session = self._open_session()
        ends: tuple[tuple[CallEnd, Coroutine[Any, Any, object]], ...] = (
            ("hung_up", self._handle(session)),
            ("hung_up", self._peer.gone.wait()),
            ("too_slow", session.too_slow.wait()),
            ("too_fast", self._hear(session)),
            ("time_limit", self._watch(session)),
        )
        try:
            await session.begin()
            tasks = {asyncio.create_task(work): end for end, work in ends}
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for each in done:
                    each.result()
                return next(end for task, end in tasks.items() if task in done)
            finally:
                for each in tasks:
                    each.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await session.close()

    async def _handle(self, session: Session) -> None:
        while True:
            text = await self._peer.message()
            self._active = asyncio.get_running_loop().time()
            await receive(text, session)

    async def _watch(self, session: Session) -> None:
        """Return when the call is too long, or nothing has happened for too long."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._longest_s
        self._active = loop.time()
        while (now := loop.time()) < end:
            if session.answering:
                self._active = now
            if now >= self._active + IDLE_S:
                log.info("%s ends: no event for %.0f s", self.id, IDLE_S)
                return
            await asyncio.sleep(min(end, self._active + IDLE_S) - now)
        log.info("%s ends: it has lasted %.0f s (gateway.webrtc.max_call_s)", self.id, self._longest_s)

    async def _hear(self, session: Session) -> None:
        """Append what the client says to the session's input, until it sends faster than anybody speaks."""
        if self._peer.voice is None:
            await asyncio.Event().wait()
            return
        loop = asyncio.get_running_loop()
        resampler = AudioResampler("s16", "mono", SAMPLE_RATE)
        begun, heard_s, refused = loop.time(), 0.0, False
        while (frame := await _frame(self._peer.voice)) is not None:
            heard_s += frame.samples / frame.sample_rate
            if heard_s > loop.time() - begun + FAST_S:
                log.info("%s ends: its client sends audio faster than it is spoken", self.id)
                return
            data = b"".join(each.to_ndarray().tobytes() for each in resampler.resample(frame))
            try:
                await session.handle(AppendAudio(type="input_audio_buffer.append", audio=data))
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

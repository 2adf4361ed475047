"""The transport of a call: events on its data channel, speech on its track."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec
from aiortc import InvalidStateError, RTCDataChannel

from gateway.http.connection import ClientGoneError
from gateway.http.protocol import STALL_S
from gateway.http.realtime.transport import Played
from gateway.http.realtime.webrtc.speech import SpeechTrack

MAX_UNREAD: Final = 2**20
"""Bytes of events that wait for the client to read."""
log = logging.getLogger(__name__)


class CallTransport:
    """See :class:`gateway.http.realtime.transport.Transport`.

    Attributes:
        track: The speech that goes to the client.
        stalled: The client has read no event for too long.
    """

    plays: Final = True

    def __init__(self) -> None:
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

    async def send(self, kind: str, fields: dict[str, Any]) -> None:
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
        """See :meth:`gateway.http.realtime.transport.Transport.send_audio`."""
        await self.track.push(place, pcm, start_delay_ms / 1000)

    def stop_audio(self) -> list[Played]:
        """See :meth:`gateway.http.realtime.transport.Transport.stop_audio`."""
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

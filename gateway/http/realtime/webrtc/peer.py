"""The connection to the client of a call."""

import asyncio
import logging
from typing import Final

from aiortc import (
    InvalidStateError,
    MediaStreamTrack,
    RTCConfiguration,
    RTCDataChannel,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)
from aiortc.exceptions import InternalError, InvalidAccessError, OperationError

from gateway.http.connection import ClientGoneError
from gateway.http.realtime.webrtc.ice import restrict
from gateway.http.realtime.webrtc.offer import advertise
from omnirelay.errors import InvalidRequestError
from shared.config.gateway import WebRtcConfig

CHANNEL: Final = "oai-events"
CLOSE_S: Final = 5.0
MAX_MESSAGES: Final = 256
"""Events of the client that wait to be processed."""
MAX_MESSAGE_BYTES: Final = 16 * 2**20
"""Of them together."""
MAX_CHANNELS: Final = 4
MAX_SOURCES: Final = 4
"""Streams of packets by source; aiortc keeps statistics of each."""
MAX_UNASSEMBLED: Final = 2**20
"""Bytes of incomplete messages, beyond those that aiortc announces to take."""
CHECK_S: Final = 1.0
_REFUSALS: Final = (
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    InternalError,
    InvalidAccessError,
    InvalidStateError,
    OperationError,
)
"""What aiortc's parser and negotiation raise for offers that it does not understand."""
log = logging.getLogger(__name__)


class Peer:
    """A connection that sends one track, and receives another one and messages.  Must be closed.

    Attributes:
        opened: The channel for events, once it is there; ClientGoneError if the connection ends before.
        voice: The client's track.
        gone: Set when the connection has ended.
    """

    def __init__(self, track: MediaStreamTrack, config: WebRtcConfig) -> None:
        self.opened: Final[asyncio.Future[RTCDataChannel]] = asyncio.get_running_loop().create_future()
        self.voice: MediaStreamTrack | None = None
        self.gone: Final = asyncio.Event()
        self._config = config
        self._messages: asyncio.Queue[str | bytes] = asyncio.Queue(MAX_MESSAGES)
        self._waiting_bytes = 0
        self._channels = 0
        # Without an empty list aiortc asks a public STUN server.
        self._connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        voice = self._connection.addTransceiver(track)
        codecs = RTCRtpSender.getCapabilities("audio").codecs
        voice.setCodecPreferences([each for each in codecs if each.mimeType == "audio/opus"])
        self._connection.on("track", self._on_track)
        self._connection.on("datachannel", self._on_channel)
        self._connection.on("connectionstatechange", self._on_state)

    async def answer(self, offer: str) -> str:
        """Accept an offer that was checked, and return the answer.

        Raises:
            InvalidRequestError: It cannot be accepted.
        """
        try:
            await self._connection.setRemoteDescription(RTCSessionDescription(offer, "offer"))
            # Bundled: both media sections have one transport.
            transport = self._connection.getTransceivers()[0].receiver.transport.transport
            restrict(transport, [str(each) for each in self._config.addresses])
            await self._connection.setLocalDescription()
        except _REFUSALS as error:
            log.debug("an offer is refused", exc_info=error)
            raise InvalidRequestError(
                "the SDP offer cannot be used: it needs Opus, ICE and DTLS as browsers offer them", "sdp"
            ) from error
        answer = self._connection.localDescription.sdp
        if "a=candidate:" not in answer:
            raise InvalidRequestError("this gateway has no address for calls (gateway.webrtc.addresses)")
        return advertise(answer, [str(each) for each in self._config.advertised])

    async def message(self) -> str | None:
        """Wait for the next message; none for one that is no text."""
        data = await self._messages.get()
        self._waiting_bytes -= len(data)
        return data if isinstance(data, str) else None

    async def watch(self) -> None:
        """Return when the client makes aiortc keep more than a client needs; it has no limits of its own."""
        receiver = self._connection.getTransceivers()[0].receiver
        sctp = self._connection.sctp
        while len(receiver.getSynchronizationSources()) <= MAX_SOURCES and (
            sctp is None or sctp._advertised_rwnd >= -MAX_UNASSEMBLED
        ):
            await asyncio.sleep(CHECK_S)
        log.info("a call ends: its client fills the gateway's memory")

    def end(self) -> None:
        """The connection has ended, or is to."""
        self.gone.set()
        if not self.opened.done():
            self.opened.set_exception(ClientGoneError())

    async def close(self) -> None:
        """Free sockets, threads and codecs, and tell the client."""
        self.opened.cancel()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._connection.close()
        except TimeoutError:
            log.warning("a connection by WebRTC was not closed within %g s", CLOSE_S)

    def _on_track(self, track: MediaStreamTrack) -> None:
        self.voice = track

    def _on_channel(self, channel: RTCDataChannel) -> None:
        self._channels += 1
        if self._channels > MAX_CHANNELS:
            log.info("a call ends: its client opens more than %d channels", MAX_CHANNELS)
            self.end()
            return
        if channel.label != CHANNEL or self.opened.done():
            channel.close()
            return
        channel.on("message", self._on_message)
        channel.on("close", self.end)
        self.opened.set_result(channel)

    def _on_message(self, data: str | bytes) -> None:
        self._waiting_bytes += len(data)
        if self._messages.full() or self._waiting_bytes > MAX_MESSAGE_BYTES:
            log.info("a call ends: its client sends events faster than they can be processed")
            self.end()
            return
        self._messages.put_nowait(data)

    def _on_state(self) -> None:
        if self._connection.connectionState in ("failed", "closed"):
            self.end()

"""The connection to the client of a call: its offer, and bounds on what strangers can do to its sockets."""

import asyncio
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from aioice import stun
from aiortc import (
    InvalidStateError,
    MediaStreamTrack,
    RTCConfiguration,
    RTCDataChannel,
    RTCIceTransport,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSctpTransport,
    RTCSessionDescription,
)
from aiortc.exceptions import InternalError, InvalidAccessError, OperationError
from aiortc.rtcrtpreceiver import RemoteStreamTrack
from aiortc.rtcsctptransport import Chunk, SackChunk
from aiortc.rtp import AnyRtcpPacket, RtcpRtpfbPacket

from gateway.http.connection import ClientGoneError
from omnirelay.errors import InvalidRequestError
from shared.config.gateway import WebRtcConfig

log = logging.getLogger(__name__)


MAX_SDP_BYTES: Final = 2**16
MAX_LINES: Final = 1000
MAX_LINE: Final = 1024
MAX_KEPT: Final = 160
"""Lines of an offer that aiortc gets: it compares codecs with each other and with what is said of them."""
MEDIA: Final = ("application", "audio")
_LINE: Final = re.compile(r"[a-z]=[\x20-\x7e\t]*")
_VIDEO: Final = re.compile(r"video \d+ (\S+ .+)")
_DROPPED: Final = ("a=candidate:", "a=end-of-candidates", "a=remote-candidates:")
_CANDIDATE: Final = re.compile(r"(a=candidate:\S+ \S+ udp \S+ )(\S+)( \S+ typ host.*)", re.IGNORECASE)


class Offer(NamedTuple):
    """An offer that was checked.

    Attributes:
        sdp: Its voice and its data channel, without candidates.
        refused: Its other media, which are not served: place among the media, and section of the answer.
    """

    sdp: str
    refused: Sequence[tuple[int, str]]

    def complete(self, answer: str) -> str:
        """Return an answer that also refuses what is not served (RFC 3264, 6)."""
        head, *sections = answer.removesuffix("\r\n").split("\r\nm=")
        for at, section in self.refused:
            sections.insert(at, section)
        return "\r\nm=".join([head, *sections]) + "\r\n"


def read_offer(data: bytes) -> Offer:
    """Check an offer of one voice and one data channel on one transport; video besides them is refused.

    Nothing is ever sent to an address that a client names: its own checks, which prove that it is there, show
    where it is.  That also spares resolving the mDNS names behind which browsers hide their addresses.

    Raises:
        InvalidRequestError: It is no such offer, or exceeds a limit.
    """
    if len(data) > MAX_SDP_BYTES:
        raise _invalid(f"it has more than {MAX_SDP_BYTES} bytes")
    try:
        lines = data.decode("ascii").replace("\r\n", "\n").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise _invalid("it is not ASCII") from error
    if len(lines) > MAX_LINES or any(len(line) > MAX_LINE for line in lines):
        raise _invalid(f"it has more than {MAX_LINES} lines, or one with more than {MAX_LINE} characters")
    if lines[0] != "v=0" or not all(_LINE.fullmatch(line) for line in lines):
        raise _invalid("it is not SDP, which begins with v=0")
    lines, refused = _without_video(lines)
    media = sorted(line[2:].partition(" ")[0] for line in lines if line.startswith("m="))
    if tuple(media) != MEDIA:
        raise _invalid(
            f"it offers {', '.join(media) or 'nothing'}: one audio track and a data channel are needed"
        )
    sections = "\n".join(lines).split("\nm=")[1:]
    mids = [" ".join(_values(section.split("\n"), "a=mid:")) for section in sections]
    bundles = [each.split(" ") for each in _values(lines, "a=group:")]
    if len(set(mids)) < len(MEDIA) or ["BUNDLE", *mids] not in bundles:
        raise _invalid(
            "audio and data channel must share one transport: a=group:BUNDLE with the a=mid of both"
        )
    if not _values(lines, "a=fingerprint:"):
        raise _invalid("it has no a=fingerprint of a certificate for DTLS")
    kept = [line for line in lines if not line.startswith(_DROPPED)]
    if len(kept) > MAX_KEPT:
        raise _invalid(f"it has more than {MAX_KEPT} lines besides video and candidates")
    return Offer("\r\n".join([*kept, ""]), refused)


def _without_video(lines: Sequence[str]) -> tuple[list[str], list[tuple[int, str]]]:
    """Take the sections of video out of an offer, and return also what answers them."""
    head, *sections = "\n".join(lines).split("\nm=")
    kept, refused, mids = [], [], set[str]()
    for at, section in enumerate(sections):
        first, *rest = section.split("\n")
        if not (video := _VIDEO.fullmatch(first)):
            kept.append(section)
            continue
        own = [line for line in rest if line.startswith("a=mid:")]
        mids.update(_values(own, "a=mid:"))
        refused.append((at, "\r\n".join([f"video 0 {video[1]}", "c=IN IP4 0.0.0.0", "a=inactive", *own])))
    begun = [
        " ".join(each for each in line.split(" ") if each not in mids)
        if line.startswith("a=group:")
        else line
        for line in head.split("\n")
    ]
    return "\nm=".join(["\n".join(begun), *kept]).split("\n"), refused


def advertise(answer: str, addresses: Sequence[str]) -> str:
    """Return an answer whose candidates name these addresses instead, if there are any."""
    if not addresses:
        return answer
    lines: list[str] = []
    for line in answer.split("\r\n"):
        found = _CANDIDATE.fullmatch(line)
        if found is None:
            lines.append(line)
            continue
        version = ipaddress.ip_address(found[2]).version
        same = [address for address in addresses if ipaddress.ip_address(address).version == version]
        lines += [f"{found[1]}{address}{found[3]}" for address in same]
    return "\r\n".join(lines)


def _values(lines: Iterable[str], prefix: str) -> list[str]:
    return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the SDP offer cannot be used: {problem}", "sdp")


MAX_ADDRESSES: Final = 16
"""From which a client may send checks: each is answered by checks of our own."""
MAX_DATAGRAM: Final = 2048
"""More than networks carry in one piece, and than a client's media and messages have."""
MAX_EARLY: Final = 64
"""Datagrams that are kept until the connection is there."""


def restrict(transport: RTCIceTransport, own: list[str]) -> None:
    """Restrict the connection of a transport that has not gathered candidates yet.

    It binds its ``own`` addresses only (if there are any), and what comes without the user name of this call
    is not answered, or it could be made to send to an address that a packet pretends to come from.  aioice
    has neither settings nor limits for that; the methods that are replaced are those that its sockets call.
    """
    connection, early = transport._connection, 0
    gather, request_received = connection.get_component_candidates, connection.request_received
    data_received = connection.data_received

    async def gather_own(component: int, addresses: list[str], timeout: int = 5) -> Any:
        """Bind sockets."""
        return await gather(component, own or addresses, timeout)

    def take_request(message: stun.Message, addr: tuple[str, int], protocol: Any) -> None:
        """Take a check of an address that is known or one of few."""
        name = message.attributes.get("USERNAME", "")
        known = [(each.host, each.port) for each in connection.remote_candidates]
        if (
            message.message_method == stun.Method.BINDING
            and "MESSAGE-INTEGRITY" in message.attributes
            and name.startswith(f"{connection.local_username}:")
            and (addr in known or len(known) < MAX_ADDRESSES)
        ):
            request_received(message, addr, protocol)

    def take_data(data: bytes, component: int) -> None:
        """Take a datagram of the connection, or one of a few before it is there."""
        nonlocal early
        if len(data) > MAX_DATAGRAM:
            return
        if transport.state != "completed":
            early += 1
            if early > MAX_EARLY:
                return
        data_received(data, component)

    connection.get_component_candidates = gather_own  # type: ignore[method-assign]
    connection.request_received = take_request  # type: ignore[method-assign]
    connection.data_received = take_data  # type: ignore[method-assign]


MAX_STREAMS: Final = 16
MAX_CHUNKS: Final = 2048
"""Parts of messages that wait for others: aiortc walks through all of them at each."""


def restrict_messages(sctp: RTCSctpTransport, end: Callable[[], None]) -> None:
    """Call ``end`` when a client has more chunks wait than it needs; aiortc has no limits of its own.

    An acknowledgement of chunks that were never sent is ignored: one datagram can list 20 million.
    """
    receive = sctp._receive_chunk

    async def take(chunk: Chunk) -> None:
        if isinstance(chunk, SackChunk):
            listed = sum(max(0, last - first + 1) for first, last in chunk.gaps)
            if listed > len(sctp._sent_queue):
                return
        streams = sctp._inbound_streams
        waiting = max(sum(len(each.reassembly) for each in streams.values()), len(sctp._sack_misordered))
        if len(streams) > MAX_STREAMS or waiting > MAX_CHUNKS:
            log.info("a call ends: its client sends messages in parts that do not end")
            end()
        else:
            await receive(chunk)

    sctp._receive_chunk = take  # type: ignore[method-assign]


def send_once(sender: RTCRtpSender) -> None:
    """Send no packet of speech again: none is agreed on, and one datagram can ask for thousands."""
    handle = sender._handle_rtcp_packet

    async def take(packet: AnyRtcpPacket) -> None:
        if not isinstance(packet, RtcpRtpfbPacket):
            await handle(packet)

    sender._handle_rtcp_packet = take  # type: ignore[method-assign]


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
MAX_UNHEARD: Final = 3000
"""Frames of a minute, which wait while the session waits for its client to read events."""
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
        send_once(voice.sender)
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
            if self._connection.sctp is not None:
                restrict_messages(self._connection.sctp, self.end)
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
        sctp = self._connection.sctp
        while (
            len(self._connection.getTransceivers()[0].receiver.getSynchronizationSources()) <= MAX_SOURCES
            and (sctp is None or sctp._advertised_rwnd >= -MAX_UNASSEMBLED)
            and not (isinstance(self.voice, RemoteStreamTrack) and self.voice._queue.qsize() > MAX_UNHEARD)
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
        for step in (self._connection.close, self._free):
            try:
                async with asyncio.timeout(CLOSE_S):
                    await step()
                return
            except TimeoutError:
                log.warning("a connection by WebRTC was not closed within %g s", CLOSE_S)

    async def _free(self) -> None:
        """Close what aiortc leaves open: it waits for ever for a task that has failed.

        That which sends reports fails at timestamps that no report can hold.
        """
        voice, sctp = self._connection.getTransceivers()[0], self._connection.sctp
        await voice.sender.stop()
        if sctp is not None:
            await sctp.stop()
        await voice.receiver.transport.stop()
        await voice.receiver.transport.transport.stop()

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

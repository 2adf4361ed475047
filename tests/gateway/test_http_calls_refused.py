"""Calls that are refused: offers, limits, keys, gateways without calls."""

import asyncio
import errno
import re
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import pytest
from aiortc import RTCRtpSender
from aiortc.rtcsctptransport import DataChunk, RTCSctpTransport, SackChunk
from aiortc.rtp import RTCP_RTPFB_NACK, RtcpRtpfbPacket, RtpPacket
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.http.realtime.webrtc.call import SpeechTrack
from gateway.http.realtime.webrtc.peer import (
    MAX_DATAGRAM,
    MAX_SDP_BYTES,
    Peer,
    advertise,
    read_offer,
    restrict,
    restrict_messages,
    send_once,
)
from omnirelay.errors import InvalidRequestError, MissingPackageError
from shared.config import Config
from shared.config.gateway import WebRtcConfig
from tests.gateway.bench import BEARER, OTHER, Configure, Patch
from tests.gateway.caller import Caller, calling
from tests.gateway.http_bench import HttpBench, app_of, http_bench, http_gateway
from tests.gateway.realtime import PUSH_TO_TALK, talking
from tests.gateway.test_http_calls import CALLS, connected, free, have_much_told, with_calls

URL = "/v1/realtime/calls"
SDP = {"Content-Type": "application/sdp"}
GATEWAY = CALLS


async def an_offer() -> str:
    async with httpx.AsyncClient() as http, calling(http) as c:
        return await c.offer()


@pytest.fixture(scope="module")
def offer() -> str:
    return asyncio.run(an_offer())


async def answered(sdp: bytes) -> str:
    """What a peer answers to an offer."""
    config = WebRtcConfig(addresses=[IPv4Address("127.0.0.1")])
    peer = Peer(SpeechTrack(lambda _kind, _fields: None), config)
    try:
        offer = read_offer(sdp)
        return offer.complete(await peer.answer(offer.sdp))
    finally:
        await peer.close()


def test_nothing_of_an_offer_says_where_to_send(offer: str) -> None:
    assert "a=candidate:" in offer
    kept = read_offer(offer.encode()).sdp
    assert "candidate" not in kept
    assert len(kept.splitlines()) == sum("candidate" not in line for line in offer.splitlines())


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda _: "", "begins with v=0"),
        (lambda _: "v=0", "nothing"),
        (lambda sdp: sdp + "a=x\r\n" * MAX_SDP_BYTES, "bytes"),
        (lambda sdp: sdp.replace("v=0", "v=1", 1), "begins with v=0"),
        (lambda sdp: sdp + "x" * 2000, "characters"),
        (lambda sdp: sdp + "a=x\r\n" * 1000, "lines"),
        (lambda sdp: sdp + "a=rtcp-fb:* nack\r\n" * 200, "lines besides"),
        (lambda sdp: sdp + "\xe9", "ASCII"),
        (lambda sdp: sdp + "a=\x00", "not SDP"),
        (lambda sdp: sdp + "m=text 9 UDP/TLS/RTP/SAVPF 96\r\n", "text"),
        (lambda sdp: sdp[: sdp.index("m=application")], "audio"),
        (lambda sdp: sdp.replace("a=group:BUNDLE", "a=group:LS"), "BUNDLE"),
        (lambda sdp: re.sub("a=mid:.*\r\n", "", sdp), "BUNDLE"),
        (lambda sdp: sdp.replace("a=mid:1\r\n", "").replace("a=mid:0", "a=mid:0\r\na=mid:1"), "BUNDLE"),
        (lambda sdp: sdp.replace("BUNDLE 0 1", "BUNDLE 0 0").replace("a=mid:1", "a=mid:0"), "BUNDLE"),
        (lambda sdp: sdp.replace("opus/48000/2", "G729/8000"), "Opus"),
        (lambda sdp: re.sub("a=ice-pwd:.*\r\n", "", sdp), "ICE"),
        (lambda sdp: re.sub("a=fingerprint:.*\r\n", "", sdp), "DTLS"),
        (lambda sdp: re.sub("a=rtcp-mux\r\n", "", sdp), "ICE"),
        (lambda sdp: sdp.replace("a=setup:actpass", "a=setup:what"), "DTLS"),
    ],
)
async def test_refused_offers(offer: str, change: Callable[[str], str], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as refused:
        await answered(change(offer).encode())
    assert refused.value.param == "sdp"


async def test_a_refused_offer_keeps_nothing(web: HttpBench, offer: str) -> None:
    answer = await web.http.post(URL, content=offer.replace("opus/48000/2", "G729/8000"), headers=SDP)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "sdp")
    await free(web)
    assert web.process.access.http_places.quota.used <= 1


async def test_a_call_with_video_is_a_call_without(offer: str) -> None:
    voice, data = offer.index("m=audio"), offer.index("m=application")
    video = "m=video 9 UDP/TLS/RTP/SAVPF 96\r\na=mid:v\r\na=rtpmap:96 VP8/90000\r\na=recvonly\r\n"
    refused = "m=video 0 UDP/TLS/RTP/SAVPF 96\r\nc=IN IP4 0.0.0.0\r\na=inactive\r\na=mid:v\r\n"
    for at in (min(voice, data), max(voice, data), len(offer)):
        with_video = offer[:at] + video + offer[at:]
        with_video = with_video.replace("BUNDLE 0 1", "BUNDLE 0 v 1")
        answer = await answered(with_video.encode())
        media = re.findall("m=([a-z]+)", answer)
        assert media == re.findall("m=([a-z]+)", with_video)
        assert refused in answer
        assert "a=group:BUNDLE 0 1\r\n" in answer


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_offers_with_any_fault_are_answered_or_refused(offer: str, data: st.DataObject) -> None:
    lines = offer.split("\r\n")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        line, cut = lines[at], data.draw(st.integers(0, len(lines[at])))
        put = data.draw(st.sampled_from(["", ":", " ", "-1", "99999999999", "a=b", "/", "0"]))
        lines[at] = data.draw(
            st.sampled_from([line[:cut] + put, put + line[cut:], line[:cut] + put + line[cut:]])
        )

    with suppress(InvalidRequestError):
        asyncio.run(answered("\r\n".join(lines).encode("latin-1", "replace")))


async def test_no_offers(web: HttpBench, offer: str) -> None:
    for headers, content, status in (
        (SDP, b"v" * 2**19, 413),
        ({"Content-Type": "application/json"}, b"{}", 400),
        ({"Content-Type": "multipart/form-data"}, b"", 400),
        ({}, b"", 400),
    ):
        assert (await web.http.post(URL, content=content, headers=headers)).status_code == status
    assert (await web.http.get(URL)).status_code == 405
    other = await web.http.post(f"{URL}?model=gpt-realtime", content=offer, headers=SDP)
    assert other.status_code == 404


async def test_refused_forms(web: HttpBench, offer: str) -> None:
    forms: list[tuple[dict[str, str], str | None]] = [
        ({"session": "{}"}, "sdp"),
        ({"sdp": "v=0", "session": "{"}, None),
        ({"sdp": "v=0", "more": "1"}, None),
        (
            {"sdp": offer, "session": '{"audio": {"output": {"voice": "Nobody"}}}'},
            "session.audio.output.voice",
        ),
        ({"sdp": offer, "session": '{"model": "other"}'}, "session.model"),
    ]
    for form, param in forms:
        answer = await web.http.post(URL, files={name: (None, text) for name, text in form.items()})
        assert answer.status_code in (400, 404), answer.text
        assert answer.json()["error"]["param"] == param


async def test_calls_and_websockets_count_together(
    configure: Configure, monkeypatch: Patch, offer: str
) -> None:
    monkeypatch.setattr("gateway.http.realtime.endpoint.MAX_SESSIONS", 5)

    async with http_bench(configure(with_calls())) as b:
        async with connected(b), connected(b), talking(b), talking(b):
            answer = await b.http.post(URL, content=offer, headers=SDP)
            assert answer.status_code == 429
            assert "retry-after" in answer.headers
        await free(b)
        async with connected(b):
            pass


async def test_calls_are_limited_by_themselves(configure: Configure, offer: str) -> None:
    async with http_bench(configure(with_calls(max_calls=5))) as b:
        codes = [(await b.http.post(URL, content=offer, headers=SDP)).status_code for _ in range(5)]
        assert codes == [201] * 4 + [429]
        # Sessions by WebSocket go on.
        async with talking(b):
            pass


async def test_a_call_is_a_connection(configure: Configure, offer: str) -> None:
    async with http_bench(configure(with_calls(), max_connections=5)) as b:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(base_url=b.url, limits=limits, timeout=60) as http:
            codes = [(await http.post(URL, content=offer, headers=SDP)).status_code for _ in range(4)]
        assert codes == [201, 201, 201, 429]


async def test_a_call_without_a_peer_keeps_no_place(web: HttpBench, offer: str) -> None:
    short = OSError(errno.EMFILE, "Too many open files")
    with mock.patch("gateway.http.realtime.webrtc.endpoint.Peer", side_effect=short):
        assert (await web.http.post(URL, content=offer, headers=SDP)).status_code == 500
    assert await web.metric('omnirelay_realtime_sessions{connection="webrtc"}') == 0


async def test_keys(configure: Configure, keys: str) -> None:
    config = configure({**with_calls(), "api_keys": keys})
    async with http_bench(config) as b, calling(b.http, BEARER) as c:
        assert (await b.http.post(URL, content=await c.offer(), headers=SDP)).status_code == 401
        await c.call(PUSH_TO_TALK)
        other = {"Authorization": f"Bearer {OTHER}"}
        for headers, status in (({}, 401), (other, 404)):
            assert (await b.http.post(f"{c.location}/hangup", headers=headers)).status_code == status
        assert not c.ended.is_set()
        assert (await c.hang_up()).status_code == 200
        await free(b)


async def test_a_browser_calls_with_an_ephemeral_key(configure: Configure, keys: str) -> None:
    config = configure({**with_calls(), "api_keys": keys})
    async with http_bench(config) as b:
        ordered = {"type": "realtime", "instructions": "Be brief."}
        secret = await b.http.post("/v1/realtime/client_secrets", json={"session": ordered}, headers=BEARER)
        async with calling(b.http, {"Authorization": f"Bearer {secret.json()['value']}"}) as c:
            session = await c.call()
            assert session["instructions"] == "Be brief."
            assert session["audio"]["input"]["turn_detection"]["type"] == "server_vad"
            assert (await c.hang_up()).status_code == 200


async def test_a_gateway_without_calls_says_what_is_needed(configure: Configure) -> None:
    async with http_bench(configure(http_gateway())) as b:
        for path in (URL, f"{URL}/rtc_1/hangup"):
            answer = await b.http.post(path, content="v=0", headers=SDP)
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "calls_disabled")
            assert "omnirelay-server[webrtc]" in answer.json()["error"]["message"]


def test_calls_need_the_extra() -> None:
    config = Config.model_validate({"gateway": {"webrtc": {"enabled": True}}})
    with mock.patch.dict(sys.modules, {"aiortc": None}):
        for loaded in [name for name in sys.modules if name.startswith("gateway.http.realtime.webrtc.")]:
            del sys.modules[loaded]
        with pytest.raises(MissingPackageError, match=r"pip install 'omnirelay-server\[webrtc\]'"):
            app_of(config)


def test_answers_name_the_addresses_that_clients_reach() -> None:
    line = "a=candidate:1 1 udp 2130706431 {} 40000 typ host"
    answer = "\r\n".join(["v=0", line.format("10.0.0.5"), "a=x", "a=x", "a=end-of-candidates", ""])
    assert advertise(answer, []) == answer
    assert advertise(answer, ["203.0.113.7", "2001:db8::1"]) == answer.replace("10.0.0.5", "203.0.113.7")


async def test_strangers_get_no_answer_and_fill_nothing(web: HttpBench) -> None:
    async with calling(web.http) as c:
        answer = await web.http.post(URL, content=await c.offer(), headers=SDP)
        port = int(re.findall(r"udp \d+ 127\.0\.0\.1 (\d+) typ host", answer.text)[0])
        # A binding request of STUN without a user name, and what is no STUN.
        ask = bytes.fromhex("000100002112a442") + b"x" * 12
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.connect(("127.0.0.1", port))
            stranger.setblocking(False)
            for _ in range(300):
                stranger.send(ask)
                stranger.send(b"\x80" + bytes(1000))
                await asyncio.sleep(0)
            (held,) = web.process._context.calls
            assert not held.done()
            with pytest.raises(BlockingIOError):
                stranger.recv(100)
        peer = _peer_of(held)
        assert peer._queue.qsize() <= 64


async def open_channels(c: Caller) -> None:
    for number in range(10):
        c.connection.createDataChannel(f"more-{number}")


async def many_sources(c: Caller) -> None:
    transport = c.connection.getTransceivers()[0].receiver.transport
    for source in range(1, 20):
        packet = RtpPacket(payload_type=96, sequence_number=source, timestamp=source)
        packet.ssrc, packet.payload = source, b"x"
        await transport._send_rtp(packet.serialize())


async def speak_unheard(c: Caller) -> None:
    """The session waits until its client has read events, which it never does."""
    sctp: Any = c.connection.sctp
    sctp._send_sack = lambda: asyncio.sleep(0)
    have_much_told(c, 30)


async def send_chunks(
    c: Caller, count: int, *, apart: int = 1, streams: bool = False, data: bytes = b"x"
) -> None:
    """Send parts of messages: all of one, unless they are numbers ``apart`` or have streams of their own."""
    sctp = c.connection.sctp
    assert sctp is not None
    for number in range(count):
        chunk = DataChunk()
        chunk.tsn, chunk.user_data = sctp._local_tsn + apart * number + apart - 1, data
        chunk.stream_id = number + 100 if streams else 1
        await sctp._send_chunk(chunk)
        await asyncio.sleep(0)


MOST_CHUNKS = 256
endless_message = partial(send_chunks, count=300, data=bytes(1000))
many_parts = partial(send_chunks, count=300, apart=2)
many_streams = partial(send_chunks, count=40, streams=True)


async def test_what_was_never_sent_is_not_acknowledged() -> None:
    """One datagram of 1.5 kB with 370 gaps of 65,536 chunks took 1.4 s."""

    class Transport:
        state = "new"

    sctp = RTCSctpTransport(Transport())  # type: ignore[arg-type]
    taken, ended = [], asyncio.Event()

    async def receive(chunk: SackChunk) -> None:
        taken.append(chunk.gaps)

    sctp._receive_chunk = receive  # type: ignore[method-assign, assignment]
    restrict_messages(sctp, ended.set)
    sctp._sent_queue.extend([DataChunk(), DataChunk(), DataChunk()])
    for gaps in ([], [(2, 3)], [(1, 65_535)] * 2, [(65_535, 1), (1, 65_535)]):
        chunk = SackChunk()
        chunk.gaps = gaps
        await sctp._receive_chunk(chunk)
    assert taken == [[], [(2, 3)]]
    assert not ended.is_set()


async def test_no_packet_of_speech_is_sent_again() -> None:
    """One datagram asked for 6,000 packets."""
    sender, again = RTCRtpSender("audio", SimpleNamespace(state="new")), list[int]()  # type: ignore[arg-type]

    async def retransmit(sequence_number: int) -> None:
        again.append(sequence_number)

    sender._retransmit = retransmit  # type: ignore[method-assign]
    lost = RtcpRtpfbPacket(RTCP_RTPFB_NACK, 1, sender._ssrc, lost=[1] * 6000)
    await sender._handle_rtcp_packet(lost)
    assert len(again) == 6000
    send_once(sender)
    await sender._handle_rtcp_packet(lost)
    assert len(again) == 6000


def test_datagrams_are_as_long_as_a_network_carries() -> None:
    taken: list[int] = []
    connection = SimpleNamespace(
        get_component_candidates=None,
        request_received=None,
        data_received=lambda data, _: taken.append(len(data)),
    )
    restrict(SimpleNamespace(state="completed", _connection=connection), [])  # type: ignore[arg-type]
    for size in (MAX_DATAGRAM, MAX_DATAGRAM + 1):
        connection.data_received(bytes(size), 1)
    assert taken == [MAX_DATAGRAM]


@pytest.mark.parametrize(
    "attack",
    [open_channels, many_sources, endless_message, many_parts, many_streams, speak_unheard],
    ids=["channels", "sources", "an endless message", "many parts", "many streams", "unheard speech"],
)
async def test_clients_that_fill_memory_are_disconnected(
    web: HttpBench, monkeypatch: Patch, attack: Callable[[Caller], Awaitable[None]]
) -> None:
    monkeypatch.setattr("gateway.http.realtime.webrtc.peer.CHECK_S", 0.1)
    monkeypatch.setattr("gateway.http.realtime.webrtc.peer.MAX_UNHEARD", 50)
    # 2048 take seconds to send.
    monkeypatch.setattr("gateway.http.realtime.webrtc.peer.MAX_CHUNKS", MOST_CHUNKS)

    async with connected(web) as c:
        # It may be disconnected before it has sent all.
        with suppress(ConnectionError):
            await attack(c)
        await free(web)


def _peer_of(task: Any) -> Any:
    """The ICE connection of the call that a task holds."""
    call = task.get_coro().cr_frame.f_locals["call"]
    return call._peer._connection.getTransceivers()[0].receiver.transport.transport._connection

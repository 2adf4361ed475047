"""What is read of media and of names, each a small parser; the first byte tells which."""

import base64
import socket
from pathlib import Path
from typing import Any, Final, get_args
from unittest import mock
from urllib.parse import unquote_to_bytes

import msgspec
import zmq
from zmq.utils import z85

from gateway.access.places import without_port
from gateway.http.guards import _is_own, is_local
from gateway.input import urls
from gateway.input.urls import HttpsUrl, decode_data_url, is_data_url, parse_host, parse_https
from omnirelay.errors import ConfigError, MediaError, MessageError
from omnirelay.protocol import parse_address
from omnirelay.values import TraceParent
from services.thinker.media.decoded import DecodedAudio, DecodeLimits
from services.thinker.media.decoder import MediaDecoder
from services.thinker.media.formats import Format, check_format, tags_length
from services.thinker.media.pipe import ANSWERS, JOBS, LIMITS, STARTS, DecodeJob, Done, Pipe
from shared.messages import MEDIA_KINDS, ROLES, MediaKind, Role
from shared.tracing.otel import Tracer
from shared.transport.curve import WELCOME, ConnectionGuard
from shared.transport.keys import Keys
from tests.support.decoding import nbytes

MAX_BYTES: Final = 1500
PIECE: Final = 16
"""Data URLs are decoded in pieces of so few characters here."""
DECODERS: Final[tuple[msgspec.msgpack.Decoder[Any], ...]] = (ANSWERS, JOBS, LIMITS, STARTS)
BOUNDS: Final = DecodeLimits(
    max_audio_seconds=1.0,
    min_image_side=1,
    max_image_pixels=4096,
    max_video_seconds=1.0,
    max_video_frames=8,
    max_decoded_bytes=16_384,
    timeout_s=2.0,
)
_TRACEPARENT: Final = msgspec.msgpack.Decoder(TraceParent)


def check(data: bytes) -> None:
    """Hand it to the parser that it is for."""
    kind, rest = data[:1], data[1:]
    parser = PARSERS.get(kind)
    if parser is not None:
        parser(rest)


def _check_data_url(data: bytes) -> None:
    """In small pieces it is what it is in one, and what Python's own decoders say."""
    url = data.decode("utf-8", "replace")
    if not is_data_url(url):
        url = f"data:{url}"
    whole = _decoded(url)
    with mock.patch.object(urls, "PIECE_CHARACTERS", PIECE):
        assert _decoded(url) == whole
    if whole is None:
        return
    header, _, content = url.partition(",")
    expected = unquote_to_bytes(content)
    if header.rstrip().lower().endswith(";base64"):
        expected = base64.b64decode(expected + b"=" * (-len(expected) % 4))
    assert whole == expected
    assert len(whole) <= MAX_BYTES


def _decoded(url: str) -> bytearray | None:
    try:
        return decode_data_url("image 1", url, MAX_BYTES)
    except MediaError:
        return None


def _check_https(data: bytes) -> None:
    """What is taken apart can be put together, and means the same."""
    url = data.decode("utf-8", "replace")
    try:
        parsed = parse_https("image 1", url)
    except MediaError:
        return
    again = f"https://{parsed.host}:{parsed.port}{parsed.target}"
    assert parse_https("image 1", again) == parsed
    assert parse_host(f"{parsed.host}:{parsed.port}") == (parsed.host, parsed.port)
    assert isinstance(parsed, HttpsUrl)
    assert not set(parsed.host) & set("@\\[]%/ ")
    assert parsed.target.isascii()
    assert parsed.target.isprintable()


def _check_names(data: bytes) -> None:
    """Hosts, origins and addresses."""
    text = data.decode("latin-1")
    is_local(without_port(text.lower()))
    origin, _, host = text.partition(" ")
    if _is_own(origin, host):
        assert origin in (f"http://{host}", f"https://{host}")
    try:
        name, port, _ = parse_address(data.decode("utf-8", "replace"))
    except ConfigError:
        return
    assert name or "[" in text or "]" in text
    assert 0 < port < 2**16


def _check_file(data: bytes) -> None:
    """The beginning of a file, as every kind."""
    assert tags_length(data) >= 0
    for kind in MEDIA_KINDS:
        try:
            form = check_format(kind, data)
        except MediaError:
            continue
        assert form in get_args(Format)


def _check_pipe(data: bytes) -> None:
    """What a decoder process writes, or the thinker."""
    number, content = data[:1], data[1:]
    for decoder in DECODERS if not number else DECODERS[number[0] % len(DECODERS) :][:1]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(content)
            theirs.shutdown(socket.SHUT_WR)
            try:
                _receive(Pipe(ours), decoder)
            except (MessageError, EOFError):
                continue


def _receive(pipe: Pipe, decoder: msgspec.msgpack.Decoder[Any]) -> None:
    header = pipe.receive(decoder)
    assert decoder.decode(msgspec.msgpack.encode(header)) == header
    if isinstance(header, Done):
        kinds: tuple[MediaKind, ...] = MEDIA_KINDS
        kind = kinds[0 if header.pixels is None else len(header.pixels) - 2]
        job = DecodeJob(kind, 1, with_audio=kind == "video" and header.samples is not None)
        decoded = _DECODER._receive(pipe, job, header)
        assert nbytes(decoded) <= BOUNDS.max_decoded_bytes + 4 * (BOUNDS.sampling_rate + 1)
        assert isinstance(decoded, DecodedAudio) == (kind == "audio")


def _check_traceparent(data: bytes) -> None:
    """A client's is believed or passed over; one that a stage takes is one that was made here."""
    text = data.decode("latin-1")
    span = _TRACER.begin("request", text, 1)
    made = _TRACER.traceparent(span) if span is not None else None
    if made is not None:
        assert _TRACEPARENT.decode(msgspec.msgpack.encode(made)) == made
    try:
        believed = _TRACEPARENT.decode(msgspec.msgpack.encode(text))
    except msgspec.ValidationError:
        return
    if made is not None:
        assert made.split("-")[1] == believed.split("-")[1]


def _check_zap(data: bytes) -> None:
    """Frames, one behind the other with a byte for the length of each."""
    frames, at = [], 0
    while at < len(data):
        frames.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    answer = ConnectionGuard._answer(_DOOR, frames)
    assert len(answer) == 6
    # The mechanism is the sixth of the seven frames, the key the last.
    welcome = [[b"CURVE", z85.decode(_PUBLIC[role])] for role in WELCOME["gateway"]]
    assert (answer[2] == b"200") == (frames[2:3] == [b"omnirelay"] and frames[5:] in welcome)
    assert len(_DOOR._told) <= 64


PARSERS: Final = {
    b"d": _check_data_url,
    b"h": _check_https,
    b"n": _check_names,
    b"f": _check_file,
    b"p": _check_pipe,
    b"t": _check_traceparent,
    b"z": _check_zap,
}


def _make_tracer() -> Tracer:
    """A tracer that begins spans, and sends none."""
    tracer = Tracer("gateway", "http://127.0.0.1:9/v1/traces", 1.0)
    tracer.close()
    return tracer


_PUBLIC: Final[dict[Role, bytes]] = {
    role: zmq.curve_public(z85.encode(bytes([number + 1]) * 32)) for number, role in enumerate(ROLES)
}


def _make_door() -> ConnectionGuard:
    """A guard that answers questions, and guards nothing."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = ConnectionGuard(context, Keys("gateway", b"", _PUBLIC), Path("keys"))
    context.destroy(0)
    guard.join()
    return guard


_DOOR: Final = _make_door()
_DECODER: Final = MediaDecoder(BOUNDS)
_TRACER: Final = _make_tracer()

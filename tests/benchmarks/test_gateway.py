"""The benchmark of the gateway: its schedule, its clients' parsers, and a short run; never a time."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.gateway import measure
from benchmarks.gateway.__main__ import main, report
from benchmarks.gateway.clients import HttpParser, Interface, Parser, TcpParser
from benchmarks.gateway.measure import GatewayResult, latencies, measure_replicas, measure_streams
from benchmarks.gateway.stages import BLOCK_SAMPLES, CODES, chunk_samples, events
from benchmarks.measure.machine import this_machine
from omnirelay.errors import OmniRelayError
from omnirelay.events import AcceptedEvent, AudioEvent, ErrorEvent, TextEvent
from omnirelay.protocol import PROTOCOL_VERSION, Refusal, Reply, ServerMessage, Welcome, pack
from omnirelay.values import SAMPLE_RATE
from tests.gateway.checkpoint_dir import make_checkpoint_dir

TEXT, AUDIO = "text", "audio"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint_dir(tmp_path_factory.mktemp("gateway-benchmark") / "checkpoint")


def test_a_stream_has_the_pace_of_speech() -> None:
    seconds = 60
    due = list(itertools.takewhile(lambda each: each[0] < seconds, events()))
    assert [at for at, _ in due] == sorted(at for at, _ in due)
    kinds = [kind for _, kind in due]
    assert kinds.count("text") == 4 * seconds
    assert kinds.count("codec") * CODES == pytest.approx(50 * seconds, abs=CODES)
    heard = 0.0
    for number, at in enumerate(at for at, kind in due if kind == "audio"):
        assert at == pytest.approx(heard), "a chunk comes when those before it have been heard"
        heard += chunk_samples(number) / SAMPLE_RATE
    assert [chunk_samples(number) // BLOCK_SAMPLES for number in range(6)] == [1, 2, 4, 8, 8, 8]


def tcp_bytes() -> bytes:
    frames: list[ServerMessage] = [
        Welcome(PROTOCOL_VERSION),
        Reply(1, AcceptedEvent(request_id="a.1")),
        Reply(1, TextEvent(token_ids=[5], text="hi")),
        Reply(1, AudioEvent(seq=0, pcm=bytes(40))),
        Reply(1, TextEvent(token_ids=[6], text="ho")),
    ]
    return b"".join(pack(each) for each in frames)


def http_bytes() -> bytes:
    body = [
        b'{"delta":{"role":"assistant"}}',
        b'{"delta":{"audio":{"id":"audio_a.1","transcript":"hi"}}}',
        b'{"delta":{"audio":{"id":"audio_a.1","data":"' + b"A" * 900 + b'"}}}',
        b'{"delta":{"audio":{"id":"audio_a.1","transcript":"ho"}}}',
    ]
    events = [b"data: " + each + b"\n\n" for each in body]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events)
    return b"HTTP/1.1 200 OK\r\nX-Request-Id: a.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks


def fed(parser: Parser, data: bytes, cuts: list[int]) -> Iterator[str]:
    places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(places):
        yield from parser.feed(data[start:end])


@example([174])
@given(st.lists(st.integers(min_value=0, max_value=10_000), max_size=30))
def test_events_are_found_however_the_bytes_are_cut(cuts: list[int]) -> None:
    for parser, data in ((TcpParser("m"), tcp_bytes()), (HttpParser("m"), http_bytes())):
        assert list(fed(parser, data, cuts)) == [TEXT, AUDIO, TEXT]
        assert parser.request_id == "a.1"


@pytest.mark.parametrize(
    ("parser", "data"),
    [
        (TcpParser("m"), pack(Refusal("busy", "full"))),
        (TcpParser("m"), pack(Reply(1, ErrorEvent(code="busy", message="full")))),
        (HttpParser("m"), b'HTTP/1.1 429 Too Many\r\n\r\n{"error":{"message":"full"}}'),
        (HttpParser("m"), b'HTTP/1.1 200 OK\r\nX-Request-Id: a\r\n\r\ndata: {"error":{"m":"full"}}\n\n'),
    ],
)
def test_a_stream_that_fails_ends_the_run(parser: Parser, data: bytes) -> None:
    with pytest.raises(OmniRelayError, match="full"):
        list(parser.feed(data))


def test_latencies_are_of_events_sent_in_the_interval() -> None:
    sent = {"a": {"text": [1.0, 2.0, 3.0]}, "b": {"text": [2.5]}}
    received = {"a": {"text": [1.1, 2.25, 3.1]}, "b": {"text": [3.5]}}
    assert latencies(sent, received, "text", 2.0, 3.0) == [0.25, 1.0]


def test_an_event_that_did_not_come_is_an_error() -> None:
    with pytest.raises(OmniRelayError, match="1 of 2 events of text"):
        latencies({"a": {"text": [1.0, 2.0]}}, {"a": {"text": [1.1]}}, "text", 0.0, 3.0)
    # What was sent later may still be under way.
    assert len(latencies({"a": {"text": [1.0, 2.0]}}, {"a": {"text": [1.1]}}, "text", 0.0, 2.0)) == 1


@pytest.mark.long
@pytest.mark.parametrize("interface", ["tcp", "http"])
def test_streams_are_held_and_all_their_events_come(
    monkeypatch: pytest.MonkeyPatch, model: Path, interface: Interface
) -> None:
    monkeypatch.setattr(measure, "SETTLE_S", 5.0)
    level = measure_streams(model, interface, 3, 4.0)
    assert (level.interface, level.streams) == (interface, 3)
    # In a second a stream has four of text, about four of codec ids, and up to two chunks of audio.
    assert 3 * 7 <= level.events_per_s <= 3 * 12
    assert level.cpu_us_per_event > 0
    assert 0 < level.text.p50 <= level.text.p99 <= level.text.most
    assert level.every.most == max(level.text.most, level.audio.most)


def test_replicas_that_send_heartbeats_and_a_report(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(measure, "SETTLE_S", 0.0)
    level = measure_replicas(model, 2, 0.1, 0.5)
    assert (level.replicas, level.heartbeat_s) == (2, 0.1)
    assert level.loop_cpu > 0
    text = report(GatewayResult(machine=this_machine(), streams=[], replicas=[level]))
    assert "| 2 | 0.1 s |" in text


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_whole_run(tmp_path: Path) -> None:
    few = ["--streams", "40", "--replicas", "1", "8", "--seconds", "2"]
    assert main([*few, "--heartbeats", "0.5", "--out", str(tmp_path), "--name", "few"]) == 0
    result = msgspec.json.decode((tmp_path / "few-gateway.json").read_bytes(), type=GatewayResult)
    streams = [(each.interface, each.streams) for each in result.streams]
    assert streams == [("tcp", 40), ("http", 40)]
    assert [each.replicas for each in result.replicas] == [1, 8]
    assert (tmp_path / "few-gateway.md").read_text(encoding="utf-8") == report(result)

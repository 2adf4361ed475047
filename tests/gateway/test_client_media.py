"""What the client makes of paths, bytes, arrays and pictures, and how it writes it."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from omnirelay import (
    AudioPart,
    ChatMessage,
    GenerateRequest,
    TextPart,
    VideoPart,
    audio,
    errors,
    image,
    video,
)
from omnirelay.client.request import build_request
from omnirelay.client.transport.outbox import Outbox, Pieces, frames_of, request_pieces
from omnirelay.content import MediaPart, media_of
from omnirelay.protocol import MAX_PIECE_BYTES, PIECE_BYTES, Cancel, Piece, Submit, Welcome, pack
from tests.gateway.bench import Patch

RNG = np.random.default_rng(0)
UNLIMITED = Welcome(1)


def file_of(part: MediaPart) -> io.BytesIO:
    assert part.data is not None
    return io.BytesIO(part.data)


@pytest.mark.parametrize("shape", [(1,), (1001,), (1000, 2), (7, 6)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int16])
def test_samples_become_wav_without_loss(shape: tuple[int, ...], dtype: Any) -> None:
    samples = RNG.uniform(-1, 1, shape)
    samples = (samples * 32_767).astype(np.int16) if dtype is np.int16 else samples.astype(dtype)
    for given_samples in (samples, np.repeat(samples, 2, axis=0)[::2], np.asfortranarray(samples)):
        file = file_of(audio(given_samples, 44_100))
        read, rate = soundfile.read(file, dtype="int16" if dtype is np.int16 else "float32")
        assert rate == 44_100
        expected = samples if dtype is np.int16 else samples.astype(np.float32)
        assert np.array_equal(read, expected)
    with av.open(file_of(audio(samples, 44_100)), "r") as container:
        stream = container.streams.audio[0]
        assert (stream.rate, stream.channels) == (44_100, samples.shape[1] if samples.ndim == 2 else 1)
        assert sum(frame.samples for frame in container.decode(stream)) == len(samples)


@pytest.mark.parametrize(
    ("samples", "rate", "told"),
    [
        (np.zeros(9, np.float32), None, "need a sampling_rate"),
        (np.zeros(0, np.float32), 16_000, r"not \[0\]"),
        (np.zeros((2, 2, 2), np.float32), 16_000, r"not \[2, 2, 2\]"),
        (np.zeros((2, 16_000), np.float32), 16_000, "up to 32 channels"),
        (np.zeros(9, np.int32), 16_000, "not int32"),
        (np.array([0, np.nan], np.float32), 16_000, "must be finite"),
        (np.array([0, 1e300]), 16_000, "fit float32"),
        (np.zeros(9, np.float32), 0, "must be positive"),
        (np.zeros(9, np.float32), -5, "do not fit a WAV"),
        (np.zeros(9, np.float32), 2**40, "do not fit a WAV"),
        (np.zeros(9, np.float32), 16_000.5, "do not fit a WAV"),
    ],
)
def test_samples_that_are_none(samples: Any, rate: Any, told: str) -> None:
    with pytest.raises(errors.MediaError, match=told):
        audio(samples, rate)


@pytest.mark.parametrize("shape", [(1, 1, 3), (33, 47, 3), (33, 47)])
def test_pixels_become_png_without_loss(shape: tuple[int, ...]) -> None:
    pixels = RNG.integers(0, 256, shape, np.uint8)
    for given_pixels in (pixels, pixels[::-1][::-1], np.asfortranarray(pixels)):
        with Image.open(file_of(image(given_pixels))) as read:
            assert read.format == "PNG"
            assert np.array_equal(np.asarray(read), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_pictures_of_pil_become_png(mode: str) -> None:
    original = Image.fromarray(RNG.integers(0, 256, (9, 11, 3), np.uint8)).convert(mode)
    with Image.open(file_of(image(original))) as read:
        assert (read.format, read.mode) == ("PNG", mode if mode not in ("CMYK", "YCbCr", "HSV") else "RGB")
        assert np.array_equal(np.asarray(read.convert("RGB")), np.asarray(original.convert("RGB")))


def test_pictures_of_16_bits_and_those_without_a_range() -> None:
    deep = RNG.integers(0, 2**16, (9, 11), np.uint16)
    with Image.open(file_of(image(Image.fromarray(deep)))) as read:
        assert np.array_equal(np.asarray(read), deep)
    for mode in ("I", "F"):
        with pytest.raises(errors.MediaError, match=f"mode {mode} has no defined range"):
            image(Image.new(mode, (2, 2)))


@pytest.mark.parametrize("frames", [1, 2, 5])
@pytest.mark.parametrize("still", [False, True])
@pytest.mark.parametrize("fps", [24, 2.0, 29.97, 30_000 / 1001, 0.5])
def test_frames_become_a_video_without_loss(frames: int, still: bool, fps: float) -> None:
    """One frame for each, also of equal ones, at equal distances."""
    pixels = RNG.integers(0, 256, (frames, 20, 30, 3), np.uint8)
    pixels = np.repeat(pixels[:1], frames, axis=0) if still else pixels
    pictures = [Image.fromarray(each) for each in pixels]
    for source in (pixels, pictures, tuple(pictures)):
        file = file_of(video(source, fps))
        with av.open(file, "r") as container:
            assert container.format.name == "apng"
            read = list(container.decode(video=0))
        assert np.array_equal(np.stack([each.to_ndarray(format="rgb24") for each in read]), pixels)
        for number, each in enumerate(read):
            assert each.time == pytest.approx(number / fps, abs=1e-3)
    with Image.open(file_of(video(pixels, fps))) as opened:
        assert getattr(opened, "n_frames", 1) == frames


@given(st.floats(1 / 65_535, 65_535))
def test_any_rate_of_frames_fits(fps: float) -> None:
    file = file_of(video(np.zeros((2, 1, 1, 3), np.uint8), fps)).getvalue()
    control = file.index(b"fcTL") + 4 + 20
    delay = Fraction(
        int.from_bytes(file[control : control + 2]), int.from_bytes(file[control + 2 : control + 4])
    )
    assert float(delay) == pytest.approx(1 / fps, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: image(np.zeros((4, 4, 4), np.uint8)), r"must be uint8 \[h, w, 3\], not uint8 \[4, 4, 4\]"),
        (lambda: image(np.zeros((4, 4, 3), np.float32)), "not float32"),
        (lambda: image(np.zeros((0, 4, 3), np.uint8)), r"\[0, 4, 3\]"),
        (lambda: video(np.zeros((2, 4, 4, 3), np.uint8)), "need an fps"),
        (lambda: video(np.zeros((4, 4, 3), np.uint8), 2), r"\[frames, h, w, 3\]"),
        (lambda: video(np.zeros((0, 4, 4, 3), np.uint8), 2), r"\[0, 4, 4, 3\]"),
        (lambda: video(np.zeros((2, 4, 4, 3), np.uint8), 0), "fps must be from"),
        (lambda: video(np.zeros((2, 4, 4, 3), np.uint8), float("nan")), "fps must be from"),
        (lambda: video([Image.new("RGB", (2, 2)), Image.new("RGB", (2, 3))], 2), "one size"),
        (lambda: video(b"film", fps=2), "a file has its own"),
        (lambda: audio(b"sound", sampling_rate=2), "a file has its own"),
        (lambda: audio(5), "AudioPart cannot be made from int"),  # type: ignore[arg-type]
        (lambda: image(audio(b"sound")), "cannot be made from AudioPart"),  # type: ignore[arg-type]
        (lambda: image("http://example.com/x"), "https: URLs only"),
        (lambda: image("a\0b"), "cannot read"),
    ],
)
def test_what_is_no_source_is_told(make: Any, told: str) -> None:
    with pytest.raises(errors.MediaError, match=told):
        make()


def test_files_bytes_and_urls_are_sent_as_they_are(tmp_path: Path, monkeypatch: Patch) -> None:
    path = tmp_path / "a file.mp4"
    path.write_bytes(b"film")
    for source in (path, str(path), b"film", bytearray(b"film"), memoryview(b"film")):
        assert video(source) == VideoPart(data=memoryview(b"film"))
    monkeypatch.chdir(tmp_path)
    assert audio("a file.mp4") == AudioPart(data=memoryview(b"film"))
    for url in ("https://example.com/x", "HTTPS://example.com/x", "data:,x"):
        assert image(url).url == url
    part = audio(b"sound")
    assert audio(part) is part
    unread = Image.open(io.BytesIO(file_of(image(np.zeros((64, 64, 3), np.uint8))).getvalue()[:60]))
    for picture in (unread, Image.new("RGB", (0, 5))):
        with pytest.raises(errors.MediaError, match="cannot be read"):
            image(picture)
    with pytest.raises(errors.MediaError, match="cannot be read"):
        video([unread, unread], 2)


def test_what_cannot_be_read_is_named_by_item_and_path(tmp_path: Path, monkeypatch: Patch) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "large.png").write_bytes(bytes(11))
    monkeypatch.setattr("omnirelay.client.media.MAX_FILE_BYTES", 10)
    for name, told in (
        ("none.png", "No such file"),
        (".", "Is a directory"),
        ("empty.png", "is empty"),
        ("large.png", "larger than 10"),
    ):
        path = tmp_path / name
        with pytest.raises(errors.MediaError, match=told) as raised:
            build_request("Hi", images=[b"picture", path])
        assert str(raised.value).startswith("image 2: ")
        assert str(path) in str(raised.value)


def test_media_stand_before_the_text_in_one_message() -> None:
    made = build_request(
        "What is this?",
        system="Be brief.",
        videos=[b"1"],
        images=(b"2", b"3"),
        audio=b"4",
        use_audio_in_video=True,
    )
    system, user = made.messages
    assert system == ChatMessage("system", "Be brief.")
    assert user.role == "user"
    assert user.content == [audio(b"4"), image(b"2"), image(b"3"), video(b"1"), TextPart("What is this?")]
    assert made.use_audio_in_video
    assert build_request("", images=b"2").messages == [ChatMessage("user", [image(b"2")])]
    assert build_request("Hi", images=[], audio=[]) == build_request("Hi")
    pictures = [Image.new("RGB", (4, 4))] * 2
    with pytest.raises(errors.MediaError, match="video 1: frames need an fps"):
        build_request("Hi", videos=pictures)
    assert len(media_of(build_request("Hi", videos=[video(pictures, 2)] * 2, images=pictures).messages)) == 4


def test_media_beside_what_carries_its_own_are_refused() -> None:
    with pytest.raises(TypeError, match="into its messages"):
        build_request([ChatMessage("user", "Hi")], images=b"x")
    with pytest.raises(TypeError, match="itself"):
        build_request(GenerateRequest(), audio=b"x")


@settings(max_examples=30)
@given(st.lists(st.lists(st.one_of(st.text(max_size=5), st.binary(max_size=40)), max_size=4), max_size=4))
def test_a_frame_in_pieces_is_the_frame(contents: list[list[str | bytes]]) -> None:
    messages = [
        ChatMessage("user", [TextPart(each) if isinstance(each, str) else image(each) for each in content])
        for content in contents
    ]
    request = GenerateRequest(messages=messages, seed=3)
    [(length, *pieces)] = frames_of(7, request_pieces(request, UNLIMITED), UNLIMITED)
    body = b"".join(pieces)
    assert int.from_bytes(length) == len(body)
    submit = msgspec.msgpack.decode(body, type=Submit)
    assert submit.id == 7
    assert msgspec.msgpack.decode(submit.request, type=GenerateRequest) == request
    plain = GenerateRequest(messages=[message for message in messages if not media_of([message])])
    [frame] = frames_of(7, request_pieces(plain, UNLIMITED), UNLIMITED)
    assert b"".join(frame) == pack(Submit(7, msgspec.Raw(msgspec.msgpack.encode(plain))))


@pytest.mark.parametrize("size", [PIECE_BYTES - 100, PIECE_BYTES, 2 * MAX_PIECE_BYTES, 10**6 + 1])
def test_a_long_request_goes_in_pieces_to_a_gateway_that_takes_them(size: int) -> None:
    request = build_request("Hi", images=RNG.bytes(size))
    pieces = request_pieces(request, UNLIMITED)
    whole = b"".join(pieces)
    frames = [b"".join(frame) for frame in frames_of(7, pieces, Welcome(1, max_piece_bytes=MAX_PIECE_BYTES))]
    assert all(len(frame) <= MAX_PIECE_BYTES + 100 for frame in frames)
    sent = [msgspec.msgpack.decode(frame[4:], type=Piece) for frame in frames]
    assert b"".join(piece.data for piece in sent) == whole
    assert [piece.offset for piece in sent] == list(range(0, len(whole), MAX_PIECE_BYTES))
    assert [piece.last for piece in sent] == [False] * (len(sent) - 1) + [True]
    [frame] = frames_of(7, pieces, Welcome(1))
    assert msgspec.msgpack.decode(b"".join(frame)[4:], type=Submit).request == msgspec.Raw(whole)


def test_files_are_not_copied_into_the_frame() -> None:
    data = bytes(10**6)
    pieces = request_pieces(build_request("Hi", images=data, audio=data), UNLIMITED)
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert [view.obj is data for view in views] == [True, True]
    assert sum(len(piece) for piece in pieces if not isinstance(piece, memoryview)) < 200


def test_limits_of_the_gateway_are_kept_before_anything_is_sent() -> None:
    limits = Welcome(1, max_frame_bytes=2000, max_item_bytes=1000, max_media_bytes=1500)
    request_pieces(build_request("Hi", images=bytes(1000)), limits)
    with pytest.raises(
        errors.MediaTooLargeError, match="image 2: 1001 bytes, the gateway takes at most 1000"
    ):
        request_pieces(build_request("Hi", images=[b"x", bytes(1001)]), limits)
    with pytest.raises(errors.MediaTooLargeError, match="1600 bytes of media together"):
        request_pieces(build_request("Hi", images=[bytes(800)] * 2), limits)
    with pytest.raises(errors.InvalidRequestError, match="the gateway takes at most 2000"):
        request_pieces(build_request("x" * 2000), limits)
    with pytest.raises(errors.InvalidRequestError, match="cannot be sent"):
        request_pieces(build_request("\udcff", images=b"x"), limits)
    with pytest.raises(errors.InvalidRequestError, match="cannot be sent: seed, max_tokens: ") as raised:
        request_pieces(build_request("Hi", seed=2**64, max_tokens=-(2**64)), limits)
    assert raised.value.param == "seed"


def test_what_an_older_gateway_does_not_know_is_not_sent_to_it() -> None:
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(build_request("Hi", seed=1)))
    assert encoded == {"messages": [{"role": "user", "content": "Hi"}], "seed": 1}
    assert msgspec.msgpack.decode(b"\x82\xa4type\xa7welcome\xa7version\x01", type=Welcome) == Welcome(1)


@asynccontextmanager
async def sending() -> AsyncIterator[tuple[Outbox, asyncio.Event, bytearray]]:
    """An outbox that is at work, when its peer is to read, and what arrived there."""
    reads, ended, arrived = asyncio.Event(), asyncio.Event(), bytearray()

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reads.wait()
        while piece := await reader.read(2**20):
            arrived.extend(piece)
        writer.close()
        ended.set()

    async with asyncio.timeout(60), await asyncio.start_server(read, "127.0.0.1", 0) as server:
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        outbox = Outbox(writer)
        working = asyncio.create_task(outbox.run())
        yield outbox, reads, arrived
        working.cancel()
        writer.close()
        await ended.wait()


@pytest.mark.parametrize("limits", [UNLIMITED, Welcome(1, max_piece_bytes=MAX_PIECE_BYTES)])
async def test_a_large_request_waits_for_its_reader_and_lets_others_work(limits: Welcome) -> None:
    """What is written is bounded however large the request is, and the loop comes round in between.

    A cancel goes before the next piece of it, and behind it where the gateway takes no pieces.
    """
    async with sending() as (outbox, reader, arrived):
        pieces: Pieces = [b"head", memoryview(RNG.bytes(2**25)), b"tail"]
        frames = [b"".join(frame) for frame in frames_of(1, pieces, limits)]
        upload = outbox.submit(1, pieces, limits)
        waiting = 0
        for _ in range(2000):
            await asyncio.sleep(0)
            waiting = max(waiting, outbox._writer.transport.get_write_buffer_size())
        assert 0 < waiting <= 2 * PIECE_BYTES
        assert 0 < upload.sent_bytes < 2**25
        begun = upload.sent_bytes // MAX_PIECE_BYTES + 2
        cancel = pack(Cancel(2))
        outbox.say(cancel)
        reader.set()
        rounds = 0
        while len(arrived) < sum(map(len, frames)) + len(cancel):
            await asyncio.sleep(0)
            rounds += 1
        assert rounds > 2**25 / PIECE_BYTES
        at = arrived.index(cancel)
        assert arrived[:at] + arrived[at + len(cancel) :] == b"".join(frames)
        assert at <= sum(map(len, frames[:begun]))
        assert upload.sent_bytes == upload.total_bytes


async def test_of_a_request_that_is_cancelled_no_more_is_sent() -> None:
    async with sending() as (outbox, reader, arrived):
        limits = Welcome(1, max_piece_bytes=MAX_PIECE_BYTES)
        for client_id in (1, 2):
            outbox.submit(client_id, [memoryview(bytes(2**30))], limits)
        reader.set()
        while len(arrived) < MAX_PIECE_BYTES:
            await asyncio.sleep(0)
        assert not outbox.withdraw(1)
        assert outbox.withdraw(2)
        assert not outbox.withdraw(3)
        outbox.say(b"the end")
        while not arrived.endswith(b"the end"):
            await asyncio.sleep(0)
        assert len(arrived) < 2**25

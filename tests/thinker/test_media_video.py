"""Videos and animations against transformers' PyAV reader and its sampling."""

import struct
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media import video as animation
from services.thinker.media.container import MediaFile
from services.thinker.media.decoded import DecodedAudio, DecodedVideo, Pixels
from services.thinker.media.decoder import MediaDecoder
from services.thinker.media.video import decode_frames, sample_frames
from shared.vllm.torchvision_compat import declare_missing_operators
from tests.support.decoding import LIMITS, decoding, limits
from tests.support.media import (
    SENTENCE,
    VIDEO_FORMATS,
    animate,
    clip,
    encode_video,
    motion,
    picture,
    speech,
    spoken,
)

declare_missing_operators()

from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor  # noqa: E402
from transformers.video_utils import VideoMetadata, load_video  # noqa: E402

PROCESSOR = Qwen2VLVideoProcessor()
COMPRESSED = 4.0
"""Largest mean difference between the frames of a clip and what they were made of."""


def decoded(decoder: MediaDecoder, data: bytes) -> Pixels:
    video = decoder.decode("video", data, name="video 1")
    assert isinstance(video, DecodedVideo)
    assert video.audio is None
    assert (video.frames.dtype.name, video.frames.ndim) == ("uint8", 4)
    return video.frames


def difference(frames: Pixels, wanted: Pixels) -> float:
    """Of the frame that differs most, in levels of 255."""
    assert frames.shape == wanted.shape
    return float(np.abs(frames.astype(np.int16) - wanted).mean(axis=(1, 2, 3)).max())


def theirs(metadata: VideoMetadata, **_: Any) -> Any:
    return PROCESSOR.sample_frames(metadata, fps=2.0, min_frames=4, max_frames=10**9, temporal_patch_size=2)


@given(
    seconds=st.floats(0.01, 300),
    rate=st.one_of(st.sampled_from([1, 5, 10, 15, 23.976, 24, 25, 29.97, 30, 50, 60]), st.floats(0.5, 60)),
)
@settings(deadline=None, max_examples=500)
def test_samples_the_frames_that_transformers_samples(seconds, rate):
    # With many more frames, theirs depends on how many numbers the processor rounds at once.
    total = max(2, min(round(seconds * rate), 16_000))
    wanted = theirs(VideoMetadata(total_num_frames=total, fps=rate)).numpy()
    # By rounding, torch.arange may give one index more, which is that of no frame.
    assert np.array_equal(sample_frames(total, rate, limits(max_video_frames=600)), wanted[wanted < total])


@pytest.mark.parametrize(
    ("seconds", "rate"), [(2.0, 24), (5.0, 30), (0.2, 25), (3.3, 30), (1.0, 60), (4.0, 2)]
)
def test_equals_transformers(decoder, tmp_path, seconds, rate):
    for form in ("mp4", "mov"):
        data = clip(form, seconds, rate)
        (tmp_path / "clip").write_bytes(data)
        wanted, _ = load_video(str(tmp_path / "clip"), backend="pyav", sample_indices_fn=theirs)
        assert np.array_equal(decoded(decoder, data), wanted)


@pytest.mark.parametrize("form", VIDEO_FORMATS)
def test_the_right_frames_come_out(decoder, form):
    for seconds, rate in ((2.0, 24), (3.5, 30)):
        source = motion(seconds, rate)
        wanted = source[sample_frames(len(source), rate, LIMITS)]
        assert difference(decoded(decoder, clip(form, seconds, rate)), wanted) < COMPRESSED


HEALTHY: dict[str, Callable[[], bytes]] = {
    "mp4 to be streamed": lambda: encode_video(motion(), 24, movflags="faststart"),
    "mp4 in fragments": lambda: encode_video(
        motion(), 24, movflags="frag_keyframe+empty_moov+default_base_moof"
    ),
    "webm of a browser": lambda: encode_video(motion(), 24, "webm", live="1"),
    "webm with vp8": lambda: encode_video(motion(), 24, "webm", codec="libvpx"),
    "mp4 with hevc": lambda: encode_video(
        motion(),
        24,
        codec="libx265",
        encoder={"preset": "ultrafast", "x265-params": "log-level=none:open-gop=1"},
    ),
    "mp4 with open groups": lambda: encode_video(
        motion(), 24, encoder={"preset": "veryfast", "x264-params": "open-gop=1:keyint=12:bframes=3"}
    ),
    "mp4 with mpeg4": lambda: encode_video(motion(), 24, codec="mpeg4", encoder={"qscale": "2"}),
    "mp4 with something behind": lambda: clip() + bytes(100),
    "mkv with something behind": lambda: clip("mkv") + bytes(100),
}


@pytest.mark.parametrize("what", HEALTHY)
def test_healthy_files_are_taken(decoder, what):
    source = motion()
    wanted = source[sample_frames(len(source), 24, LIMITS)]
    assert difference(decoded(decoder, HEALTHY[what]()), wanted) < 2 * COMPRESSED


def with_hidden_frames(data: bytes, count: int) -> bytes:
    """A webm with vp8 and, before each key frame, copies of it that are not to be shown."""
    file = BytesIO()
    with av.open(BytesIO(data), "r") as source, av.open(file, "w", format="webm") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is None:
                continue
            frame = bytes(packet)
            for _ in range(count if packet.is_keyframe else 0):
                hidden = av.Packet(bytes([frame[0] & ~0x10]) + frame[1:])
                hidden.stream, hidden.time_base = stream, packet.time_base
                hidden.pts, hidden.dts = packet.pts, packet.dts
                target.mux(hidden)
            packet.stream = stream
            target.mux(packet)
    return file.getvalue()


def test_frames_that_nobody_sees_are_not_counted(decoder):
    data = encode_video(motion(), 24, "webm", codec="libvpx")
    assert np.array_equal(decoded(decoder, with_hidden_frames(data, 40)), decoded(decoder, data))


def test_a_few_frames_may_not_come_out_of_the_decoder():
    source = motion(0.75)
    data = encode_video(source, 24)
    wanted = np.array([0, 6, 13, 20])
    with MediaFile(data, "mp4") as file:
        frames = decode_frames(file, wanted, 27, LIMITS)
    # Of 27 frames that were counted there are 18: for the 20th stands the one that was taken before it.
    assert difference(frames, source[[0, 6, 13, 13]]) < COMPRESSED
    with (
        MediaFile(data, "mp4") as file,
        pytest.raises(MediaError, match="the file is cut short: of 38 frames 18 can be decoded"),
    ):
        decode_frames(file, wanted, 38, LIMITS)


def test_a_video_with_far_too_many_frames_is_not_read_to_its_end():
    frames = np.repeat(motion(0.1, 20, 64, 48), 400, axis=0)
    error = pytest.raises(MediaError, match=r"it has .* frames a second; at most 240 are taken")
    with decoding(max_video_seconds=1.0) as short, error:
        short.decode("video", encode_video(frames, 1000, "mkv"), name="video 1")


@pytest.mark.parametrize(
    ("matrix", "turns", "mirrored"),
    [
        ((1, 0, 0, 1, 0, 0), 0, False),
        ((0, 1, -1, 0, 240, 0), -1, False),
        ((-1, 0, 0, -1, 320, 240), 2, False),
        ((0, -1, 1, 0, 0, 320), 1, False),
        ((-1, 0, 0, 1, 320, 0), 0, True),
        ((1, 0, 0, -1, 0, 240), 2, True),
        ((0, 1, 1, 0, 0, 0), -1, True),
        ((0, -1, -1, 0, 240, 320), 1, True),
    ],
)
def test_a_phone_may_have_been_held_upright_or_show_who_films(decoder, matrix, turns, mirrored):
    """First turned counterclockwise, then mirrored, as the matrix says where each corner goes."""
    data = clip()
    a, b, c, d, x, y = matrix
    place = data.index(b"tkhd") + 44
    rows = (a << 16, b << 16, 0, c << 16, d << 16, 0, x << 16, y << 16, 1 << 30)
    turned = np.rot90(decoded(decoder, data), turns, axes=(1, 2))
    expected = turned[:, :, ::-1] if mirrored else turned
    shown = decoded(decoder, data[:place] + struct.pack(">9i", *rows) + data[place + 36 :])
    assert np.array_equal(shown, expected)


def test_frames_that_do_not_fit_are_scaled_down():
    source = motion(3.0, 24)
    room = 500_000
    with decoding(max_decoded_bytes=room) as small:
        for data in (clip(seconds=3.0), animate(source, "png", 42)):
            frames = decoded(small, data)
            count, height, width, _ = frames.shape
            assert 0.95 * room < frames.nbytes <= room
            assert count == 6
            assert width / height == pytest.approx(4 / 3, rel=0.02)
            assert abs(float(frames.mean()) - float(source[::12].mean())) < COMPRESSED
    with (
        decoding(max_decoded_bytes=1000) as tiny,
        pytest.raises(MediaTooLargeError, match="6 frames of 320 by 240 pixels do not fit in 1,000 bytes"),
    ):
        tiny.decode("video", clip(seconds=3.0), name="video 1")


@pytest.mark.parametrize("form", VIDEO_FORMATS)
def test_the_sound_comes_along(decoder, form):
    video = decoder.decode("video", clip(form, text=SENTENCE), name="video 1", with_audio=True)
    assert isinstance(video, DecodedVideo)
    assert video.audio is not None
    assert video.audio.nbytes == 4 * video.audio.size
    heard = decoder.decode("audio", clip(form, text=SENTENCE), name="audio 1")
    assert isinstance(heard, DecodedAudio)
    assert np.array_equal(video.audio, heard.samples)
    assert np.corrcoef(video.audio[:30_000], speech()[:30_000])[0, 1] > 0.97


def test_a_sound_track_that_is_longer_than_a_video_may_be_is_cut_off():
    long = np.resize(speech(SENTENCE, 48_000), 4 * 48_000).astype(np.float32)
    data = encode_video(motion(1.0), 24, samples=long)
    with decoding(max_video_seconds=1.5) as short:
        video = short.decode("video", data, name="video 1", with_audio=True)
        assert isinstance(video, DecodedVideo)
        assert video.audio is not None
        assert video.audio.size == 1.5 * LIMITS.sampling_rate


def test_the_sound_of_a_silent_film_is_refused(decoder):
    for data in (clip(), clip("webm"), animate(motion(1.0, 5))):
        with pytest.raises(
            MediaError, match=r"^video 1: there is no sound track .* use_audio_in_video needs one"
        ):
            decoder.decode("video", data, name="video 1", with_audio=True)
    assert decoded(decoder, clip()).shape == (4, 240, 320, 3)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(clip, form) for form in VIDEO_FORMATS),
        *(HEALTHY[what] for what in ("mp4 to be streamed", "mp4 in fragments")),
        *(partial(animate, motion(1.0, 5), form) for form in ("png", "gif", "webp")),
    ],
)
def test_a_file_that_is_cut_short_is_refused(decoder, make):
    data = make()
    # A container may declare a second more than it holds.
    for share in (0.4, 0.25, 0.01):
        with pytest.raises(MediaError, match=r"^video 1: "):
            decoder.decode("video", data[: int(len(data) * share)], name="video 1")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", MediaError, "the file is empty"),
        (b"no video" * 100, MediaError, "this is none of mp4, mov, webm, mkv, animated gif, png, webp"),
        (b"#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1/a.ts\n", MediaError, "this is none of"),
        (spoken("wav"), MediaError, "this is none of mp4, .*, but wav"),
        (spoken("m4a"), MediaError, "there are no moving pictures"),
        (picture("png"), MediaError, "it is a still picture"),
        (picture("gif"), MediaError, "it is a still picture"),
        (encode_video(motion()[:1], 24), MediaError, "a video must have 2 frames at least; this one has 1"),
        (encode_video(motion(), 300), MediaError, "it has 300.0 frames a second; at most 240 are taken"),
        (
            encode_video(motion(), Fraction(1, 5)),
            MediaTooLargeError,
            "it lasts 240.00 s; at most 60 s are taken",
        ),
        (
            animate(motion(1.0, 5), "png", 20_000),
            MediaTooLargeError,
            "it lasts more than 60 s; at most 60 s are taken",
        ),
        (encode_video(motion()[:, :6, :64], 24), MediaError, "it is 64 by 6 pixels; each side must have 8"),
        (
            encode_video(motion(0.5), 24, "mkv", codec="ffv1", encoder={}),
            MediaError,
            "codec .* not decoded here",
        ),
        (clip().replace(b"avc1", b"xxxx"), MediaError, "codec .* not decoded here"),
    ],
)
def test_what_is_no_video_is_refused(decoder, data, error, message):
    with pytest.raises(error, match=rf"^video 3: .*{message}"):
        decoder.decode("video", data, name="video 3")


def test_more_sampled_frames_than_allowed_are_refused():
    with decoding(max_video_frames=6) as few:
        assert len(decoded(few, clip(seconds=3.0))) == 6
        with pytest.raises(
            MediaTooLargeError, match="8 frames would be taken of it, 2 a second; at most 6 may be"
        ):
            few.decode("video", clip(seconds=4.0), name="video 1")


@pytest.mark.parametrize("form", ["png", "gif", "webp"])
def test_an_animation_is_a_video(decoder, form):
    source = motion(3.0, 10)
    frames = decoded(decoder, animate(source, form, 100))
    # Pillow's webp is lossy.
    assert difference(frames, source[sample_frames(30, 10.0, LIMITS)]) < (1.5 if form == "webp" else 0.01)


@pytest.mark.parametrize("form", ["png", "gif", "webp"])
def test_a_frame_that_is_shown_for_longer_counts_for_several(decoder, form):
    # Pillow writes equal frames once, and lets the first of them last.
    source = np.repeat(motion(1.0, 4), [3, 1, 3, 1], axis=0)
    data = animate(source, form, 500)
    frames = decoded(decoder, data)
    assert difference(frames, source) < (1.5 if form == "webp" else 0.01)


def test_frames_whose_duration_is_not_told_last_a_tenth_of_a_second(decoder):
    source = motion(3.0, 10)
    assert difference(decoded(decoder, animate(source, "gif", 0)), source[::5]) < 0.01


def test_an_animation_that_is_too_long_is_not_decoded_to_its_end(monkeypatch):
    shown = mock.Mock(wraps=animation._show)
    monkeypatch.setattr(animation, "_show", shown)
    short = limits(max_video_seconds=1.0)
    with pytest.raises(MediaTooLargeError, match="it lasts more than 1 s"):
        animation.decode_animation(animate(motion(3.0, 10), "gif", 400), short)
    assert shown.call_count == 3
    with pytest.raises(MediaTooLargeError, match="it has 300 frames; at most 241 are taken"):
        animation.decode_animation(animate(motion(30.0, 10, 64, 48), "gif", 10), short)
    assert shown.call_count == 3


def test_the_picture_that_stands_for_an_animation_is_no_frame_of_it(decoder):
    source = motion(1.0, 5)
    data = animate(source[:5], "png", 500, default_image=True)
    assert difference(decoded(decoder, data), source[1:]) < 0.01


def naming_another(data: bytes, path: Path) -> bytes:
    """A mov file of zeros whose tracks are said to be in another file (QuickTime's alias data references)."""
    reference = struct.pack(">I", 0) + bytes(10) + bytes(28) + bytes(12) + bytes(64) + bytes(16)
    reference += struct.pack(">hh", -1, -1) + bytes(16)
    name = str(path).encode()
    reference += struct.pack(">hh", 2, len(name)) + name + bytes(len(name) % 2) + struct.pack(">hh", -1, 0)
    entry = struct.pack(">I4s", 8 + len(reference), b"alis") + reference
    start = data.index(b"dref") - 4
    old = int.from_bytes(data[start : start + 4], "big")
    out = data[:start] + struct.pack(">I4sII", 16 + len(entry), b"dref", 0, 1) + entry + data[start + old :]
    for parent in (b"moov", b"trak", b"mdia", b"minf", b"dinf"):
        place = out.rindex(parent, 0, start) - 4
        size = int.from_bytes(out[place : place + 4], "big") + 16 + len(entry) - old
        out = out[:place] + struct.pack(">I", size) + out[place + 4 :]
    first = out.index(b"mdat") + 4
    size = int.from_bytes(out[first - 8 : first - 4], "big") - 8
    return out[:first] + bytes(size) + out[first + size :]


def test_a_file_that_names_another_does_not_make_it_read(decoder, tmp_path):
    whole = clip("mov")
    (tmp_path / "other.mov").write_bytes(whole)
    naming = naming_another(whole, tmp_path / "other.mov")
    (tmp_path / "naming.mov").write_bytes(naming)
    # FFmpeg would follow the name if it were asked to: the test's file is what it is meant to be.
    trusting = {"enable_drefs": "1", "use_absolute_path": "1"}
    with av.open(str(tmp_path / "naming.mov"), container_options=trusting) as container:
        assert len(list(container.decode(video=0))) == 48
    with pytest.raises(MediaError, match=r"^video 1: the file is (damaged|cut short)"):
        decoder.decode("video", naming, name="video 1")

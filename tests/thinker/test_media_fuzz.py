"""Whatever a file holds, a decoder gives what its kind says or raises MediaError, and stays within bounds."""

import contextlib
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnirelay.errors import MediaError
from services.thinker.media.decoded import DecodedAudio, DecodedImage, DecodedVideo
from services.thinker.media.decoder import MediaDecoder
from shared.messages import MEDIA_KINDS, MediaKind
from tests.support.decoding import decoding, nbytes
from tests.support.media import (
    SOUND_FORMATS,
    VIDEO_FORMATS,
    animate,
    clip,
    encode_audio,
    encode_video,
    motion,
    picture,
    speech,
    spoken,
)

EXAMPLES = settings(deadline=None, max_examples=120)
RESULTS = {"audio": DecodedAudio, "image": DecodedImage, "video": DecodedVideo}
MOST_MEMORY = 800 * 2**20
"""What a child may take with these limits, its own code included."""

SMALL = speech("x")
FILES: list[tuple[MediaKind, bytes]] = [
    *(("audio", spoken(form, "x")) for form in SOUND_FORMATS),
    ("audio", encode_audio(SMALL, 16_000, "webm", live="1")),
    ("audio", encode_audio(SMALL, 16_000, "m4a", movflags="frag_keyframe+empty_moov")),
    *(("image", picture(form, 0, 64, 48)) for form in ("png", "jpeg", "webp", "gif", "bmp")),
    *(("video", clip(form, 0.5, 24, 64, 48, text="x")) for form in VIDEO_FORMATS),
    ("video", encode_video(motion(0.5, 24, 64, 48), 24, "webm", codec="libvpx")),
    ("video", encode_video(motion(0.5, 24, 64, 48), 24, "mp4", codec="mpeg4", encoder={})),
    *(("video", animate(motion(0.5, 10, 64, 48), form)) for form in ("png", "gif", "webp")),
]


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    with decoding(max_image_pixels=1_000_000, max_decoded_bytes=20_000_000, max_audio_seconds=10) as decoder:
        yield decoder


def attempt(decoder: MediaDecoder, kind: MediaKind, data: bytes, with_audio: bool) -> None:
    decoded, refusal = None, ""
    try:
        decoded = decoder.decode(kind, data, name=f"{kind} 1", with_audio=with_audio)
    except MediaError as error:
        refusal = str(error)
    if decoded is None:
        assert refusal.startswith(f"{kind} 1: ")
        # A crash in C costs this file and no more; an exception that nobody expected is ours to expect.
        assert "exit status" not in refusal
    else:
        assert isinstance(decoded, RESULTS[kind])
        assert 0 < nbytes(decoded) <= 20_000_000 + 4 * 60 * 16_000
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            assert child.memory_info().rss < MOST_MEMORY


@st.composite
def mutated(draw: st.DrawFn) -> tuple[MediaKind, bytes]:
    """A real file in which some bytes were changed, taken away, put in, moved, or cut off."""
    kind, whole = draw(st.sampled_from(FILES))
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 6))):
        # Most of what is decided is decided by the first bytes, or the last.
        size = len(data)
        place = draw(st.integers(0, 300) | st.integers(0, size) | st.integers(size - 600, size))
        place = max(0, min(place, len(data) - 1))
        match draw(st.sampled_from(["byte", "word", "out", "in", "move", "cut"])):
            case "byte":
                data[place] = draw(st.integers(0, 255))
            case "word":
                data[place : place + 4] = draw(
                    st.sampled_from([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\1", b"\1\0\0\0"])
                )
            case "out":
                del data[place : place + draw(st.integers(1, 40))]
            case "in":
                data[place:place] = draw(st.binary(min_size=1, max_size=40))
            case "move":
                start = draw(st.integers(0, len(data)))
                data[place : place + 64] = data[start : start + 64]
            case "cut":
                del data[place + 1 :]
        data = data or bytearray(b"\0")
    return draw(st.sampled_from([kind, kind, kind, *MEDIA_KINDS])), bytes(data)


@given(item=mutated(), with_audio=st.booleans())
@EXAMPLES
def test_mutated_files(decoder, item, with_audio):
    kind, data = item
    attempt(decoder, kind, data, with_audio)


signatures = st.sampled_from(
    [
        *(data[:16] for _, data in FILES),
        b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0",
        b"\0\0\0\x08moov",
        b"ID3\x04\0\0\0\0\0\0",
        b"\xff\xfb\x90\x00",
        b"#EXTM3U\n",
        b"ffconcat version 1.0\n",
        b"",
    ]
)


@given(
    start=signatures,
    rest=st.binary(max_size=400),
    kind=st.sampled_from(MEDIA_KINDS),
    with_audio=st.booleans(),
)
@EXAMPLES
def test_noise_that_begins_like_a_file(decoder, start, rest, kind, with_audio):
    attempt(decoder, kind, start + rest, with_audio)

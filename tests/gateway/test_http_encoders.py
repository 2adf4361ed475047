"""Speech in every format, in pieces: whatever the pieces, the file is the same and sounds the same."""

import base64
import wave
from io import BytesIO
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.encoding import encoders
from gateway.http.encoding.encoders import FORMATS, AudioFormat, make_encoder, require_format
from omnirelay.errors import UnsupportedFormatError
from shared.messages import SAMPLE_RATE
from tests.gateway.http_bench import cut, decoded, from_base64, likeness, melody

SAID = melody(2.5)
CHUNKS = cut(SAID, [5760, 11520, 23040])
LOSSLESS: list[AudioFormat] = ["wav", "flac", "pcm16"]
LOSSY: list[AudioFormat] = ["mp3", "opus", "aac"]


def write(form: AudioFormat, chunks: list[Any], streamed: bool = True, base64: bool = False) -> list[bytes]:
    encoder = make_encoder(form, streamed, base64)
    return [*(encoder.push(chunk.tobytes()) for chunk in chunks), encoder.finish()]


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("form", LOSSLESS)
def test_lossless_formats_keep_every_sample(form: AudioFormat, streamed: bool) -> None:
    heard = decoded(b"".join(write(form, CHUNKS, streamed)), form)
    scale = 32767 if form == "pcm16" else 32768
    assert np.array_equal(np.rint(heard * scale), np.rint(SAID * 32767))


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("form", LOSSY)
def test_lossy_formats_sound_alike(form: AudioFormat, streamed: bool) -> None:
    heard = decoded(b"".join(write(form, CHUNKS, streamed)), form)
    shift, alike = likeness(heard, SAID)
    assert 0 <= shift <= 2048
    assert SAID.size <= heard.size <= SAID.size + 4096
    assert alike > 0.98


@pytest.mark.parametrize(
    ("form", "streamed", "late", "longer"),
    [
        ("mp3", False, 0, (0, 0)),
        ("mp3", True, 1681, (1728, 2303)),
        ("aac", False, 1024, (1024, 2047)),
        ("aac", True, 1024, (1024, 2047)),
        ("opus", False, 0, (0, 0)),
        ("opus", True, 0, (0, 0)),
    ],
)
def test_the_delay_of_encoders_is_what_the_page_says(
    form: AudioFormat, streamed: bool, late: int, longer: tuple[int, int]
) -> None:
    for size in range(5760, 8000, 311):
        heard = decoded(b"".join(write(form, [SAID[:size]], streamed)), form)
        assert likeness(heard, SAID[:size])[0] == late
        assert longer[0] <= heard.size - size <= longer[1]


@pytest.mark.parametrize("form", FORMATS)
def test_the_first_chunk_is_heard_at_once(form: AudioFormat) -> None:
    """Of the shortest first chunk, 0.24 s, most is in the first piece."""
    first = write(form, CHUNKS)[0]
    assert decoded(first, form).size > 0.5 * CHUNKS[0].size


@pytest.mark.parametrize("form", ["wav", "mp3", "flac", "opus"])
def test_whole_files_tell_their_length(form: AudioFormat) -> None:
    info = soundfile.info(BytesIO(b"".join(write(form, CHUNKS, streamed=False))))
    assert (info.samplerate, info.channels) == (SAMPLE_RATE, 1)
    assert info.frames == SAID.size


def test_other_readers_take_a_stream_too() -> None:
    streamed = b"".join(write("wav", CHUNKS))
    with wave.open(BytesIO(streamed)) as file:
        assert len(file.readframes(10 * SAID.size)) == 2 * SAID.size
    assert soundfile.read(BytesIO(streamed))[0].size == SAID.size
    assert soundfile.read(BytesIO(b"".join(write("opus", CHUNKS))))[0].size == SAID.size


@pytest.mark.parametrize("form", FORMATS)
def test_base64_pieces_join_before_and_after_they_are_decoded(form: AudioFormat) -> None:
    joined = from_base64(piece.decode() for piece in write(form, CHUNKS, base64=True))
    # A stream of Ogg has a number drawn at random.
    assert form == "opus" or joined == b"".join(write(form, CHUNKS))
    assert likeness(decoded(joined, form), SAID)[1] > 0.98


@given(sizes=st.lists(st.integers(0, 3000), max_size=30))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("form", ["wav", "flac", "pcm16"])
def test_where_the_waveform_is_cut_makes_no_difference(form: AudioFormat, sizes: list[int]) -> None:
    said = SAID[: sum(sizes)]
    pieces = write(form, cut(said, sizes), base64=True)
    assert b"".join(pieces) == base64.b64encode(b"".join(write(form, [said] if said.size else [])))


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_any_float_becomes_a_sample(values: list[float]) -> None:
    samples = np.array(values, np.float32)
    heard = np.frombuffer(b"".join(write("pcm16", [samples])), "<i2")
    assert np.array_equal(heard, np.rint(np.clip(np.nan_to_num(samples), -1, 1) * 32767))


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("form", FORMATS)
def test_silence_without_end_or_beginning(form: AudioFormat, streamed: bool) -> None:
    """An answer with nothing to speak has one empty chunk."""
    for chunks in ([np.zeros(0, np.float32)], []):
        file = b"".join(write(form, chunks, streamed))
        assert len(file) <= 1000
        if form == "wav":
            with wave.open(BytesIO(file)) as header:
                assert header.getnchannels() == 1
        elif form != "pcm16":
            with av.open(BytesIO(file), "r") as opened:
                heard = [frame.to_ndarray() for frame in opened.decode(audio=0)]
            # Opus has 48,000 samples a second; mp3 and aac hold whole frames, and their encoders' delay.
            assert sum(each.shape[1] for each in heard) <= {"flac": 1, "opus": 2}.get(form, 2304)
            assert max(np.abs(each).max(initial=0.0) for each in heard) < 1e-3


def test_aac_is_refused_where_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    require_format("aac", "audio.format")
    monkeypatch.setattr(encoders, "find_spec", lambda _: None)
    require_format("mp3", "audio.format")
    with pytest.raises(UnsupportedFormatError, match="pip install av") as raised:
        require_format("aac", "audio.format")
    assert raised.value.param == "audio.format"

"""Speech in every format, faster and slower, and as telephones have it: the same however it is cut."""

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

from gateway.http.encoding import encoders, tempo
from gateway.http.encoding.encoders import FORMATS, AudioFormat, make_encoder, require_format
from gateway.http.encoding.g711 import RATE, STEP, G711Decoder, G711Encoder, Law, from_codes, to_codes
from gateway.http.encoding.tempo import Tempo, require_speed
from omnirelay.errors import UnsupportedError, UnsupportedFormatError
from shared.messages import SAMPLE_RATE
from tests.gateway.bench import Patch
from tests.gateway.http_bench import (
    MODEL,
    HttpBench,
    cut,
    decoded,
    events_in,
    from_base64,
    likeness,
    melody,
    speaking,
)

SAID = melody(2.5)
CHUNKS = cut(SAID, [5760, 11520, 23040])
LOSSLESS: list[AudioFormat] = ["wav", "flac", "pcm16"]


def write(form: AudioFormat, chunks: list[Any], streamed: bool = True, base64: bool = False) -> list[bytes]:
    encoder = make_encoder(form, streamed, base64)
    return [*(encoder.push(chunk.tobytes()) for chunk in chunks), encoder.finish()]


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("form", LOSSLESS)
def test_lossless_formats_keep_every_sample(form: AudioFormat, streamed: bool) -> None:
    heard = decoded(b"".join(write(form, CHUNKS, streamed)), form)
    scale = 32767 if form == "pcm16" else 32768
    assert np.array_equal(np.rint(heard * scale), np.rint(SAID * 32767))


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
    for said in (*(SAID[:size] for size in range(5760, 8000, 311)), SAID):
        heard = decoded(b"".join(write(form, cut(said, [5760]), streamed)), form)
        shift, alike = likeness(heard, said)
        assert (shift, alike > 0.98) == (late, True)
        assert longer[0] <= heard.size - said.size <= longer[1]


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


def test_aac_is_refused_where_its_library_is_missing(monkeypatch: Patch) -> None:
    require_format("aac", "audio.format")
    monkeypatch.setattr(encoders, "find_spec", lambda _: None)
    require_format("mp3", "audio.format")
    with pytest.raises(UnsupportedFormatError, match="pip install av") as raised:
        require_format("aac", "audio.format")
    assert raised.value.param == "audio.format"


HERTZ = 440
TONE = np.asarray(np.sin(2 * np.pi * HERTZ * np.arange(2 * SAMPLE_RATE) / SAMPLE_RATE) / 2, np.float32)


@pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.5, 2, 4])
def test_the_length_changes_and_the_pitch_does_not(speed: float) -> None:
    encoder = make_encoder("pcm16", streamed=True, speed=speed)
    data = b"".join(encoder.push(TONE[at : at + 5760].tobytes()) for at in range(0, TONE.size, 5760))
    made = np.frombuffer(data + encoder.finish(), "<i2")
    assert made.size == round(TONE.size / speed)
    spectrum = np.abs(np.fft.rfft(made * np.hanning(made.size)))
    assert abs(np.fft.rfftfreq(made.size, 1 / SAMPLE_RATE)[spectrum.argmax()] - HERTZ) < 5
    # A click is a step that the tone has not; the end may be one.
    steps = np.abs(np.diff(made[: int(made.size * 0.9)].astype(float)))
    assert steps.max() < 1.5 * np.abs(np.diff(TONE)).max() * 32767


def test_a_piece_is_heard_at_once() -> None:
    made = Tempo(1.25).push(TONE[:5760]).size
    assert made > 0.6 * 5760 / 1.25


@given(
    sizes=st.lists(st.integers(0, 3000), max_size=12), speed=st.floats(0.25, 4).filter(lambda each: each != 1)
)
@settings(max_examples=60, deadline=None)
def test_where_a_stream_is_cut_makes_no_difference(sizes: list[int], speed: float) -> None:
    said = TONE[: sum(sizes)]
    parts, whole = Tempo(speed), Tempo(speed)
    borders = np.cumsum(sizes, dtype=int)[:-1]
    made = np.concatenate([*(parts.push(piece) for piece in np.split(said, borders)), parts.finish()])
    assert np.array_equal(made, np.concatenate([whole.push(said), whole.finish()]))
    assert made.size == round(said.size / speed)


def test_speed_is_refused_where_its_library_is_missing(monkeypatch: Patch) -> None:
    require_speed(2, "speed")
    monkeypatch.setattr(tempo, "find_spec", lambda _: None)
    require_speed(1, "speed")
    with pytest.raises(UnsupportedError) as raised:
        require_speed(2, "speed")
    assert raised.value.param == "speed"


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_text_to_speech_at_another_speed(web: HttpBench, stream_format: str) -> None:
    said = melody(1.2)
    async with speaking(web, "Hi", cut(said, [5760, 11520])):
        asked = {"model": MODEL, "input": "Hi", "response_format": "pcm", "speed": 1.5}
        got = await web.http.post("/v1/audio/speech", json={**asked, "stream_format": stream_format})
        assert got.status_code == 200
        data = got.content
        if stream_format == "sse":
            data = from_base64(each.get("audio", "") for each in events_in(got.text))
        assert len(data) == 2 * round(said.size / 1.5)


LAWS: list[Law] = ["pcmu", "pcma"]
SUBTYPES = {"pcmu": "ULAW", "pcma": "ALAW"}


def tone(hertz: float, rate: int, seconds: float = 1.0) -> Any:
    return (8000 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype("<i2")


def level(samples: Any) -> float:
    """In dB, against a whole tone, without the ends."""
    inner = samples[len(samples) // 4 : -len(samples) // 4].astype(float)
    return float(20 * np.log10(max(inner.std() * 2**0.5, 1e-3) / 8000))


@pytest.mark.parametrize("law", LAWS)
def test_codes_mean_what_they_mean_elsewhere(law: Law) -> None:
    codes = bytes(range(256))
    read, _ = soundfile.read(
        BytesIO(codes), dtype="int16", samplerate=RATE, channels=1, format="RAW", subtype=SUBTYPES[law]
    )
    assert np.array_equal(from_codes(codes, law), read)


@pytest.mark.parametrize("law", LAWS)
def test_each_sample_gets_the_nearest_code(law: Law) -> None:
    samples = np.arange(-(2**15), 2**15)
    values = np.unique(from_codes(bytes(range(256)), law).astype(int))
    made = from_codes(to_codes(samples.astype(np.int16), law), law)
    above = np.clip(np.searchsorted(values, samples), 1, values.size - 1)
    least = np.minimum(np.abs(values[above] - samples), np.abs(values[above - 1] - samples))
    assert np.array_equal(np.abs(made - samples), least)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("hertz", [300, 1000, 3000])
def test_a_voice_passes_both_ways(law: Law, hertz: float) -> None:
    encoder = G711Encoder(law)
    codes = encoder.push(tone(hertz, SAMPLE_RATE).tobytes()) + encoder.finish()
    assert len(codes) == RATE
    assert abs(level(from_codes(codes, law))) < 0.3
    heard = np.frombuffer(G711Decoder(law).push(to_codes(tone(hertz, RATE), law)), "<i2")
    assert heard.size == SAMPLE_RATE
    assert abs(level(heard)) < 0.3


def test_what_a_telephone_does_not_carry_is_not_folded_into_it() -> None:
    encoder = G711Encoder("pcmu")
    codes = encoder.push(tone(5000, SAMPLE_RATE).tobytes()) + encoder.finish()
    assert level(from_codes(codes, "pcmu")) < -40
    heard = np.frombuffer(G711Decoder("pcmu").push(to_codes(tone(3000, RATE), "pcmu")), "<i2")
    spectrum = np.abs(np.fft.rfft(heard[1000:-1000] * np.hanning(heard.size - 2000)))
    images = spectrum[np.fft.rfftfreq(heard.size - 2000, 1 / SAMPLE_RATE) > 4100]
    assert images.max() < spectrum.max() / 1000


@given(sizes=st.lists(st.integers(0, 7) | st.integers(0, 2000), max_size=20), law=st.sampled_from(LAWS))
@settings(max_examples=60, deadline=None)
def test_where_codes_are_cut_makes_no_difference(sizes: list[int], law: Law) -> None:
    said = np.random.default_rng(len(sizes)).integers(-9000, 9000, sum(sizes)).astype("<i2")
    whole, parts = G711Encoder(law), G711Encoder(law)
    borders = np.cumsum(sizes, dtype=int)[:-1]
    pieces = [parts.push(piece.tobytes()) for piece in np.split(said, borders)]
    joined = b"".join([*pieces, parts.finish()])
    assert joined == whole.push(said.tobytes()) + whole.finish()
    assert len(joined) == -(-said.size // STEP)
    decoder, once = G711Decoder(law), G711Decoder(law)
    heard = b"".join(decoder.push(piece) for piece in pieces)
    assert heard == once.push(b"".join(pieces))
    assert len(heard) == 2 * STEP * len(b"".join(pieces))

"""G.711 as others write it, resampled without clicks wherever the stream is cut."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.encoding.g711 import RATE, STEP, G711Decoder, G711Encoder, Law, from_codes, to_codes
from shared.messages import SAMPLE_RATE

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
    samples = np.arange(-(2**15), 2**15).astype(np.int16)
    values = np.unique(from_codes(bytes(range(256)), law).astype(int))
    made = from_codes(to_codes(samples, law), law).astype(int)
    least = np.min(np.abs(samples.astype(int)[:, None] - values[None]), axis=1)
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


@given(sizes=st.lists(st.integers(0, 2000), max_size=20), law=st.sampled_from(LAWS))
@settings(max_examples=60, deadline=None)
def test_where_a_stream_is_cut_makes_no_difference(sizes: list[int], law: Law) -> None:
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


def test_a_few_samples_are_a_code() -> None:
    for count in range(7):
        encoder = G711Encoder("pcma")
        assert len(encoder.push(bytes(2 * count)) + encoder.finish()) == -(-count // 3)

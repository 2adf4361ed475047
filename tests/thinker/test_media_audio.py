"""Sound files against libsndfile and soxr, which decode and resample them independently."""

import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.encoding.encoders import make_encoder
from omnirelay.errors import MediaError, MediaTooLargeError
from services.thinker.media.decoded import DecodedAudio, Samples
from services.thinker.media.decoder import MediaDecoder
from tests.support.decoding import LIMITS, decoding
from tests.support.media import SENTENCE, clip, encode_audio, picture, speech, spoken

RATE = LIMITS.sampling_rate
RATES = [8000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 96_000]
EXACT = 2e-6
"""Largest difference where nothing but the order of sums differs."""


def decoded(decoder: MediaDecoder, data: bytes) -> Samples:
    audio = decoder.decode("audio", data, name="audio 1")
    assert isinstance(audio, DecodedAudio)
    assert (audio.samples.dtype.name, audio.samples.ndim) == ("float32", 1)
    assert audio.samples.nbytes == 4 * audio.samples.size
    return audio.samples


def expected(data: bytes) -> Samples:
    """What libsndfile and soxr make of the file."""
    samples, rate = soundfile.read(BytesIO(data), dtype="float32", always_2d=True)
    mono = samples.mean(axis=1)
    resampled: Samples = mono if rate == RATE else soxr.resample(mono, rate, RATE)
    return resampled


def written(samples: Any, rate: int, form: str, subtype: str) -> bytes:
    """A file as libsndfile writes it."""
    file = BytesIO()
    soundfile.write(file, samples, rate, format=form, subtype=subtype)
    return file.getvalue()


def several(rate: int, channels: int) -> Samples:
    """Speech on several channels, another one on each, ``[n, channels]``."""
    # FFmpeg does not cut what an encoder adds at the end of vorbis where the whole file is one page.
    words = speech(SENTENCE, rate)[: int(1.5 * rate)]
    return np.stack(
        [np.roll(words, 100 * channel) * (1 - 0.1 * channel) for channel in range(channels)], axis=1
    )


def test_a_wav_of_16_bits_at_the_rate_of_the_model_comes_out_as_it_is(decoder):
    integers = np.array([-32768, -1, 0, 1, 32767] * 100, np.int16)
    samples = decoded(decoder, written(integers, RATE, "WAV", "PCM_16"))
    assert np.array_equal(samples, integers.astype(np.float32) / 32768)


SUBTYPES = [
    *(
        ("WAV", subtype)
        for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
    ),
    ("WAVEX", "PCM_16"),
    ("WAVEX", "PCM_24"),
    ("RF64", "PCM_16"),
    ("FLAC", "PCM_16"),
    ("FLAC", "PCM_24"),
    ("OGG", "VORBIS"),
    ("MP3", "MPEG_LAYER_III"),
]


@pytest.mark.parametrize(("form", "subtype"), SUBTYPES)
def test_equals_libsndfile_and_soxr(decoder, form, subtype):
    first = SUBTYPES.index((form, subtype))
    rates = [rate for rate in RATES if form != "MP3" or rate <= 48_000]
    layouts = [1, 2] if form == "MP3" else [1, 2, 6]
    for number, rate in enumerate(rates, start=first):
        data = written(several(rate, layouts[number % len(layouts)]), rate, form, subtype)
        samples, wanted = decoded(decoder, data), expected(data)
        assert samples.shape == wanted.shape
        assert np.abs(samples - wanted).max() < EXACT


@given(
    integers=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=400),
    channels=st.integers(1, 2),
    rate=st.one_of(st.sampled_from(RATES), st.integers(8000, 192_000)),
    subtype=st.sampled_from(["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT"]),
    form=st.sampled_from(["WAV", "WAVEX"]),
)
@settings(deadline=None, max_examples=60)
def test_any_samples_equal_libsndfile_and_soxr(decoder, integers, channels, rate, subtype, form):
    frames = np.array(integers, np.int32)[: len(integers) // channels * channels].reshape(-1, channels)
    data = written(np.tile(frames, (20, 1)), rate, form, subtype)
    samples, wanted = decoded(decoder, data), expected(data)
    assert samples.shape == wanted.shape
    assert np.abs(samples - wanted).max() < EXACT


def test_lossy_files_of_browsers_sound_like_what_was_spoken(decoder):
    for form in ("ogg", "mp3", "m4a", "webm"):
        samples = decoded(decoder, spoken(form))
        assert abs(samples.size - speech().size) < 0.01 * RATE, form
        size = min(samples.size, speech().size)
        assert np.corrcoef(samples[:size], speech()[:size])[0, 1] > 0.97, form


def wav_that_declares(length: int) -> bytes:
    data = spoken("wav")
    start = data.index(b"data") + 4
    return data[:start] + struct.pack("<I", length) + data[start + 4 :]


def with_open_clusters(data: bytes) -> bytes:
    """A webm whose clusters declare no lengths, as Chrome records it."""
    pieces = data.split(CLUSTER)
    for number, piece in enumerate(pieces[1:], start=1):
        width = 9 - piece[0].bit_length()
        pieces[number] = ((1 << 7 * width + 1) - 1).to_bytes(width, "big") + piece[width:]
    assert len(pieces) > 3
    return CLUSTER.join(pieces)


def with_cover(data: bytes, image: bytes, media_type: bytes) -> bytes:
    """An mp3 file with a picture in its tag."""
    body = b"\0" + media_type + b"\0\x03\0" + image
    frame = b"APIC" + struct.pack(">I", len(body)) + b"\0\0" + body
    size = bytes(len(frame) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x03\0\0" + size + frame + data


def gateway_aac() -> bytes:
    """What the gateway answers with."""
    encoder = make_encoder("aac", streamed=True)
    return encoder.push(speech(SENTENCE, 24_000).tobytes()) + encoder.finish()


CLUSTER = b"\x1f\x43\xb6\x75"
TAG_BEHIND = b"TAG" + b"a title".ljust(125, b"\0")
TAG_BEFORE = b"ID3\x04\0\0\0\0\x10\0" + bytes(2048)
APE_TAG = b"APETAGEX" + struct.pack("<4I8x", 2000, 32, 0, 1 << 31)
LYRICS = b"LYRICSBEGININD00002100LYR00010abcdefghij000043LYRICS200" + TAG_BEHIND
LARGE_BOX = spoken("m4a")
_MDAT = LARGE_BOX.index(b"mdat") - 4
LARGE_BOX = (
    LARGE_BOX[: _MDAT - 8]
    + struct.pack(">I4sQ", 1, b"mdat", int.from_bytes(LARGE_BOX[_MDAT : _MDAT + 4], "big") + 8)
    + LARGE_BOX[_MDAT + 8 :]
)
"""The empty box before mdat is there to make room for this."""
MP3 = spoken("mp3")
MP3_WITHOUT_XING = encode_audio(speech(), RATE, "mp3", write_xing="0")
AAC = spoken("aac")
FLAC = spoken("flac")
WAV = spoken("wav")

HEALTHY = {
    "wav to a pipe, ffmpeg": wav_that_declares(2**32 - 1),
    "wav to a pipe, sox": wav_that_declares(0x7FFFF000),
    "wav to a pipe, zero": wav_that_declares(0),
    "wav with a chunk before": WAV[:12] + b"junk" + struct.pack("<I", 27) + bytes(28) + WAV[12:],
    "wav with a chunk behind": WAV + b"LIST" + struct.pack("<I", 8) + b"INFOabcd",
    "wav whose header declares no length": WAV[:4] + bytes(4) + WAV[8:],
    "mp3 with tags": TAG_BEFORE + TAG_BEFORE + MP3 + APE_TAG + TAG_BEHIND,
    "mp3 with lyrics": MP3 + LYRICS,
    "mp3 with zeros behind": MP3 + bytes(1000),
    "mp3 with a picture": with_cover(MP3[MP3.index(b"\xff\xf3") :], picture("png"), b"image/png"),
    "mp3 with a photo": with_cover(MP3[MP3.index(b"\xff\xf3") :], picture("jpeg"), b"image/jpeg"),
    "aac": AAC,
    "aac with tags": TAG_BEFORE + AAC + TAG_BEHIND,
    "aac of the gateway": gateway_aac(),
    "flac with the tags of mp3": TAG_BEFORE + FLAC + TAG_BEHIND,
    "flac without a length": FLAC[:21] + bytes([FLAC[21] & 0xF0]) + bytes(4) + FLAC[26:],
    "ogg with flac in it": encode_audio(speech(SENTENCE, 48_000), 48_000, "ogg", codec="flac"),
    "webm of Firefox": encode_audio(speech(), RATE, "webm", live="1"),
    "webm of Chrome": with_open_clusters(
        encode_audio(speech(), RATE, "webm", live="1", cluster_time_limit="500")
    ),
    "webm with zeros behind": spoken("webm") + bytes(100),
    "m4a to be streamed": encode_audio(speech(), RATE, "m4a", movflags="faststart"),
    "m4a in fragments": encode_audio(speech(), RATE, "m4a", movflags="frag_keyframe+empty_moov"),
    "m4a of Apple's lossless codec": encode_audio(speech(), RATE, "m4a", codec="alac"),
    "m4a with zeros behind": spoken("m4a") + bytes(100),
    "m4a whose length has 64 bits": LARGE_BOX,
}


@pytest.mark.parametrize("what", HEALTHY)
def test_healthy_files_are_taken(decoder, what):
    samples = decoded(decoder, HEALTHY[what])
    assert abs(samples.size - speech().size) < 0.12 * RATE
    # Neither aac nor an mp3 file without its encoder's note tells how much silence the encoder put before.
    lag = max(
        range(0, 1200, 1), key=lambda lag: float(np.dot(samples[lag : lag + 20_000], speech()[:20_000]))
    )
    assert np.corrcoef(samples[lag : lag + 20_000], speech()[:20_000])[0, 1] > 0.97


def test_one_ogg_behind_another_is_heard_to_the_end(decoder):
    once = decoded(decoder, spoken("ogg"))
    assert abs(decoded(decoder, spoken("ogg") * 2).size - 2 * once.size) < 0.02 * RATE


DECLARING: dict[str, bytes] = {
    **{form: spoken(form) for form in ("flac", "m4a")},
    **{what: HEALTHY[what] for what in ("m4a to be streamed", "m4a whose length has 64 bits")},
}
"""Files that say how long they are; of the others nobody can tell where they would have ended."""


@pytest.mark.parametrize("what", DECLARING)
def test_a_file_that_is_cut_short_is_refused(decoder, what):
    data = DECLARING[what]
    for share in (0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.02):
        size = int(len(data) * share)
        with pytest.raises(MediaError, match=r"^audio 1: (the file is (cut short|damaged)|this is none)"):
            decoder.decode("audio", data[:size], name="audio 1")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"hello, I am no sound" * 50, "this is none of wav, flac, ogg, mp3, aac, m4a, webm"),
        (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n", "this is none of"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "this is none of"),
        (picture("png"), "this is none of wav, flac, ogg, mp3, aac, m4a, webm, but png"),
        (clip("mp4"), "there is no sound track"),
        (written(np.zeros(0, np.int16), RATE, "WAV", "PCM_16"), "there are no samples"),
        (written(np.array([0.0, np.nan] * 500), RATE, "WAV", "FLOAT"), "infinite or no numbers"),
        (written(np.array([0.0, np.inf] * 500), RATE, "WAV", "FLOAT"), "infinite or no numbers"),
        (written(np.array([0.0, 1e300] * 500), RATE, "WAV", "DOUBLE"), "infinite or no numbers"),
        (written(np.array([0.0, 1e30] * 500), RATE, "WAV", "FLOAT"), r"its loudest sample is 1e\+30 times"),
        (written(np.zeros(500, np.int16), 500, "WAV", "PCM_16"), "it has 500 samples a second"),
        (WAV[:20], "damaged"),
        (b"RIFF\0\0\0\0WAVE", "damaged"),
        (b"OggS", "damaged"),
        (b"fLaC" + bytes(100), "damaged"),
        (b"ID3\x04\0\0\0\0\0\0" + bytes(100), "damaged|no samples"),
        (b"\x1a\x45\xdf\xa3" + bytes(100), "damaged"),
        (b"\0\0\0\x18ftypisom" + bytes(100), "damaged|no sound"),
        (
            written(speech(), RATE, "WAV", "GSM610").replace(b"\x31\0", b"\x70\1", 1),
            "damaged|not decoded here",
        ),
    ],
)
def test_what_is_no_sound_is_refused(decoder, data, message):
    with pytest.raises(MediaError, match=rf"^audio 7: .*({message})"):
        decoder.decode("audio", data, name="audio 7")


def test_a_sampling_rate_that_changes_is_refused(decoder):
    data = MP3 + encode_audio(speech(SENTENCE, 8000), 8000, "mp3")
    with pytest.raises(MediaError, match="its sampling rate changes from 16000 to 8000"):
        decoder.decode("audio", data, name="audio 1")


def test_a_sound_may_last_as_long_as_allowed_and_no_longer(decoder):
    seconds = int(LIMITS.max_audio_seconds)
    silence = np.zeros(seconds * 8000, np.int16)
    assert decoded(decoder, written(silence, 8000, "WAV", "PCM_16")).size == seconds * RATE
    longer = written(np.zeros(silence.size + 80, np.int16), 8000, "WAV", "PCM_16")
    with pytest.raises(MediaTooLargeError, match=r"audio 1: it lasts 60\.01 s; at most 60 s are taken"):
        decoder.decode("audio", longer, name="audio 1")
    by_a_sample = written(np.zeros(seconds * RATE + 1, np.int16), RATE, "WAV", "PCM_16")
    with pytest.raises(MediaTooLargeError, match="audio 1: it lasts more than 60 s; at most 60 s are taken"):
        decoder.decode("audio", by_a_sample, name="audio 1")


def test_a_length_that_is_declared_nowhere_is_found_while_decoding():
    with decoding(max_audio_seconds=1.0) as short:
        for data in (wav_that_declares(2**32 - 1), MP3, MP3_WITHOUT_XING, AAC, HEALTHY["webm of Chrome"]):
            with pytest.raises(MediaTooLargeError, match=r"audio 1: it lasts .*; at most 1 s are taken"):
                short.decode("audio", data, name="audio 1")
        for form in ("wav", "flac", "ogg", "m4a", "webm"):
            with pytest.raises(MediaTooLargeError, match=r"it lasts 2\.\d+ s; at most 1 s are taken"):
                short.decode("audio", spoken(form), name="audio 1")

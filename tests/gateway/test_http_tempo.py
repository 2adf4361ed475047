"""Speech made faster or slower: as long as it must be, as high as it was, and the same however it is cut."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.encoding import tempo
from gateway.http.encoding.encoders import make_encoder
from gateway.http.encoding.tempo import Tempo, require_speed
from omnirelay.errors import UnsupportedError
from shared.config import Config
from shared.messages import SAMPLE_RATE
from tests.gateway.http_bench import MODEL, cut, from_base64, http_bench, http_gateway, melody, speaking

HERTZ = 440
TONE = np.sin(2 * np.pi * HERTZ * np.arange(2 * SAMPLE_RATE) / SAMPLE_RATE).astype(np.float32) / 2


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
    sizes=st.lists(st.integers(0, 3000), max_size=12),
    speed=st.floats(0.25, 4).filter(lambda each: each != 1),
)
@settings(max_examples=60, deadline=None)
def test_where_a_stream_is_cut_makes_no_difference(sizes: list[int], speed: float) -> None:
    said = TONE[: sum(sizes)]
    parts, whole = Tempo(speed), Tempo(speed)
    borders = np.cumsum(sizes, dtype=int)[:-1]
    made = np.concatenate([*(parts.push(piece) for piece in np.split(said, borders)), parts.finish()])
    assert np.array_equal(made, np.concatenate([whole.push(said), whole.finish()]))
    assert made.size == round(said.size / speed)


def test_speed_is_refused_where_its_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    require_speed(2, "speed")
    monkeypatch.setattr(tempo, "find_spec", lambda _: None)
    require_speed(1, "speed")
    with pytest.raises(UnsupportedError) as raised:
        require_speed(2, "speed")
    assert raised.value.param == "speed"


@pytest.mark.parametrize("stream_format", ["audio", "sse"])
async def test_text_to_speech_at_another_speed(configure: Callable[..., Config], stream_format: str) -> None:
    said = melody(1.2)
    async with http_bench(configure(http_gateway())) as b, speaking(b, "Hi", cut(said, [5760, 11520])):
        asked = {"model": MODEL, "input": "Hi", "response_format": "pcm", "speed": 1.5}
        got = await b.http.post("/v1/audio/speech", json={**asked, "stream_format": stream_format})
        assert got.status_code == 200
        data = got.content
        if stream_format == "sse":
            events = [line[6:] for line in got.text.splitlines() if line.startswith("data: {")]
            data = from_base64(json.loads(each).get("audio", "") for each in events)
        assert len(data) == 2 * round(said.size / 1.5)

"""Turn detection: the network, windows, turns, and what of the audio is kept."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gateway.fairness.quota import MemoryBudget
from gateway.http.fields import convert_given
from gateway.http.realtime.audio import Playback
from gateway.http.realtime.input_buffers import InputAudio
from gateway.http.realtime.turn_detection import (
    EAGERNESS,
    INTERRUPTION_WINDOWS,
    ONSET_WINDOWS,
    SemanticVad,
    ServerVad,
    Turn,
    TurnListener,
    TurnRules,
    TurnTracker,
    VoicePool,
)
from gateway.http.voice.vad import (
    WEIGHTS,
    WINDOW_BYTES,
    WINDOW_MS,
    VoiceState,
    VoiceStream,
    Window,
    read_weights,
    silero,
)
from shared.config import MediaConfig
from tests.support.media import speech

RATE = 24_000
LICENCES = Path(__file__).resolve().parents[2] / "docs" / "licences.md"
RELEASED = "c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1"
"""SHA-256 of silero_vad/data/silero_vad_16k.safetensors in the wheel of silero-vad 6.2.3."""
SENTENCES = ("Hello, how are you today?", "What is six plus nine?", "Stop.", "Yes.")
VOICED, SILENT = Window(0.9), Window(0.01)


def pcm(samples: NDArray[Any]) -> bytes:
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


def said(text: str, silence_s: float = 1.5) -> bytes:
    """A text at -26 dB, after a second of silence and before more."""
    samples = speech(text, RATE)
    level = 0.05 / np.sqrt(np.mean(samples**2))
    return bytes(2 * RATE) + pcm(samples * level) + bytes(int(2 * RATE * silence_s) // 2 * 2)


def heard(data: bytes) -> list[Window]:
    return VoiceStream().windows(data[: len(data) // WINDOW_BYTES * WINDOW_BYTES])


def changes(windows: list[Window], rules: TurnRules, guarded: bool = False) -> list[tuple[str, int]]:
    tracker = TurnTracker(rules)
    found = [(tracker.hear(window, guarded), tracker.count * WINDOW_MS) for window in windows]
    return [(change, at) for change, at in found if change in {"started", "stopped"}]


def reference(samples: NDArray[np.float32]) -> list[float]:
    """The network in PyTorch."""
    weights = {name: torch.tensor(value) for name, value in read_weights(WEIGHTS).items()}
    cell = torch.nn.LSTMCell(128, 128)
    prefix = "lstm_cell."
    cell.load_state_dict({n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)})
    stream, state, found = torch.nn.functional.pad(torch.tensor(samples), (64, 0)), None, []
    with torch.no_grad():
        for at in range(0, samples.size, 512):
            window = torch.nn.functional.pad(stream[at : at + 576][None, None], (0, 64), mode="reflect")
            bins = torch.nn.functional.conv1d(window, weights["stft_conv.weight"], stride=128)
            values = (bins[:, :129] ** 2 + bins[:, 129:] ** 2).sqrt()
            for number, stride in ((1, 1), (2, 2), (3, 2), (4, 1)):
                kernel, bias = weights[f"conv{number}.weight"], weights[f"conv{number}.bias"]
                values = torch.nn.functional.conv1d(values, kernel, bias, stride, padding=1).relu()
            state = cell(values[..., 0], state)
            last = state[0].relu() @ weights["final_conv.weight"][0] + weights["final_conv.bias"]
            found.append(float(torch.sigmoid(last)))
    return found


def test_the_weights_are_the_released_ones_and_their_licence_is_with_them() -> None:
    assert hashlib.sha256(WEIGHTS.read_bytes()).hexdigest() == RELEASED
    assert "MIT License" in WEIGHTS.with_name("LICENSE").read_text(encoding="utf-8")
    assert "`silero-vad` 6.2.3" in LICENCES.read_text(encoding="utf-8")


def test_the_network_is_silero_s() -> None:
    samples = speech(SENTENCES[0], 16_000)
    samples = samples[: samples.size // 512 * 512]
    found = silero().probabilities(samples, VoiceState())
    assert np.abs(found - reference(samples)).max() < 1e-4
    assert found.max() > 0.9


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1))
def test_a_stream_is_the_same_in_any_pieces(sizes: list[int]) -> None:
    data = said(SENTENCES[1])
    whole = heard(data)
    stream, pieces, at = VoiceStream(), list[Window](), 0
    for size in [*sizes, len(whole)]:
        piece = data[at : at + size * WINDOW_BYTES]
        at += size * WINDOW_BYTES
        if len(piece) >= WINDOW_BYTES:
            pieces += stream.windows(piece[: len(piece) // WINDOW_BYTES * WINDOW_BYTES])
    for window, same in zip(pieces, whole, strict=False):
        assert window.probability == pytest.approx(same.probability, abs=1e-4)


@pytest.mark.parametrize("text", SENTENCES)
def test_a_sentence_is_one_turn(text: str) -> None:
    found = changes(heard(said(text)), ServerVad())
    assert [change for change, _ in found] == ["started", "stopped"]
    spoken_ms = 1000 * speech(text, RATE).size / RATE
    assert 1000 <= found[0][1] <= 1500
    assert 1000 + spoken_ms <= found[1][1] + 300 <= 1000 + spoken_ms + 1100


@pytest.mark.parametrize("guarded", [False, True])
def test_a_cough_is_no_turn(guarded: bool) -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        size = int(RATE * random.uniform(0.08, 0.2))
        cough = random.normal(size=size) * np.exp(-np.arange(size) / (size / 3)) * 0.1
        silence = np.zeros(RATE)
        assert changes(heard(pcm(np.concatenate([silence, cough, silence]))), ServerVad(), guarded) == []


def test_speech_gathered_while_an_answer_was_heard_does_not_begin_a_turn_after_it() -> None:
    tracker = TurnTracker(ServerVad())
    assert [tracker.hear(VOICED, guarded=True) for _ in range(ONSET_WINDOWS)] == [None] * ONSET_WINDOWS
    assert [tracker.hear(VOICED) for _ in range(ONSET_WINDOWS)] == [None] * (ONSET_WINDOWS - 1) + ["started"]


def test_an_echo_does_not_begin_a_turn_and_a_turn_goes_on_with_it() -> None:
    echo = Window(0.9, is_echo=True)
    assert changes([echo] * 30, ServerVad(), guarded=True) == []
    assert [change for change, _ in changes([VOICED] * 9 + [echo] * 90, ServerVad(), guarded=True)] == [
        "started"
    ]


def test_speech_that_may_be_an_echo_neither_counts_nor_ends_an_onset() -> None:
    unknown, left = [Window(0.9, is_echo=None)] * 8, INTERRUPTION_WINDOWS - 5
    found = changes([VOICED] * 5 + unknown + [VOICED] * left, ServerVad(), guarded=True)
    assert found == [("started", (5 + 8 + left) * WINDOW_MS)]
    assert changes([VOICED] * 5 + unknown * 4 + [VOICED] * 4, ServerVad(), guarded=True) == []


@pytest.mark.parametrize(("is_echo", "started"), [(True, False), (False, True)])
def test_windows_that_are_judged_again_count_as_they_are_found(is_echo: bool, started: bool) -> None:
    unknown = [Window(0.9, is_echo=None)] * 8
    # The window with which they are found may have no speech itself.
    for probability in (0.9, 0.1):
        found = changes([*unknown, Window(probability, False, [is_echo] * 8)], ServerVad(), guarded=True)
        assert found == ([("started", 9 * WINDOW_MS)] if started else [])


def test_a_turn_needs_more_speech_while_an_answer_is_played() -> None:
    for guarded, needed in ((False, ONSET_WINDOWS), (True, INTERRUPTION_WINDOWS)):
        assert changes([VOICED] * (needed - 1) + [SILENT] * 10, ServerVad(), guarded) == []
        assert changes([VOICED] * needed, ServerVad(), guarded) == [("started", needed * WINDOW_MS)]


WINDOWS = st.lists(st.builds(Window, st.floats(0, 1), st.booleans()), max_size=300)
RULES = st.one_of(
    st.builds(ServerVad, threshold=st.floats(0, 1), silence_duration_ms=st.integers(0, 2000)),
    st.builds(SemanticVad, eagerness=st.sampled_from(sorted(EAGERNESS))),
)


@given(WINDOWS, RULES, st.booleans())
def test_turns_alternate(windows: list[Window], rules: TurnRules, guarded: bool) -> None:
    found = changes(windows, rules, guarded)
    assert [change for change, _ in found] == (["started", "stopped"] * len(found))[: len(found)]
    times = [at for _, at in found]
    assert times == sorted(set(times))


@given(WINDOWS, RULES)
def test_a_turn_stops_or_resumes_after_a_pause(windows: list[Window], rules: TurnRules) -> None:
    tracker = TurnTracker(rules)
    paused_at: int | None = None
    for window in windows:
        was_speaking = tracker.speaking
        change = tracker.hear(window)
        if change == "paused":
            assert was_speaking
            assert paused_at is None
            paused_at = tracker.end
            assert paused_at == tracker.count
        elif change == "resumed":
            assert paused_at is not None
            paused_at = None
        elif change == "stopped":
            assert tracker.end <= tracker.count
            assert paused_at in (None, tracker.end)
            # Only a silence that is shorter than a pause ends a turn without one.
            assert paused_at is not None or tracker.end == tracker.count
            paused_at = None


@given(st.integers(0, 60_000), st.integers(0, 60_000))
def test_semantic_silence_is_within_its_bounds_and_grows_with_pauses(speech_ms: int, pause_ms: int) -> None:
    for eagerness, (least, most) in EAGERNESS.items():
        rules: Any = SemanticVad(eagerness=eagerness)  # type: ignore[arg-type]
        silence = rules.silence_ms(speech_ms, pause_ms)
        assert least <= silence <= most
        assert silence <= rules.silence_ms(speech_ms, pause_ms + 500)
        assert silence <= rules.silence_ms(0, pause_ms)


@pytest.mark.parametrize(
    "values",
    [
        {"type": "server_vad"},
        {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 200},
        {"type": "server_vad", "create_response": True, "interrupt_response": True, "idle_timeout_ms": None},
        {"type": "semantic_vad", "interrupt_response": True},
        {"type": "semantic_vad", "create_response": True, "eagerness": "medium", "interrupt_response": True},
    ],
)
def test_rules_that_clients_send(values: dict[str, Any]) -> None:
    rules = convert_given(values, TurnRules, "turn_detection")
    for name, value in values.items():
        assert name == "type" or getattr(rules, name) == value


async def listened(
    data: bytes, rules: TurnRules, piece: int, seconds: float = 60.0
) -> tuple[list[Turn], int]:
    """The turns in audio that is appended in pieces, and the most that was in the buffer between two."""
    budget = MemoryBudget(2**30, lambda: 0)
    audio = InputAudio(MediaConfig(max_audio_seconds=seconds), budget.of("a"))
    listener = TurnListener(rules, audio, VoicePool(), "a", lambda _: None, Playback())
    found, most = list[Turn](), 0
    for at in range(0, len(data), piece):
        await audio.append(data[at : at + piece])
        async for turn in listener.turns():
            if turn.change in {"started", "stopped"}:
                found.append(turn)
            if turn.change == "stopped":
                wav, hold = audio.commit(turn.position)
                assert len(wav) - 44 == hold.size <= turn.position - found[-2].position
                assert piece > 2**16 or hold.size == turn.position - found[-2].position
                hold.release()
        most = max(most, audio.size)
        assert budget.total == audio.size
    audio.clear()
    assert budget.total == 0
    return found, most


@pytest.mark.parametrize("piece", [960, 4801, 48_000, 2**24])
def test_turns_in_a_buffer(piece: int) -> None:
    data = said(SENTENCES[0]) + said(SENTENCES[1])
    found, most = asyncio.run(listened(data, ServerVad(), piece))
    assert [turn.change for turn in found] == ["started", "stopped"] * 2
    assert found[0].item_id == found[1].item_id != found[2].item_id == found[3].item_id
    # 300 ms before the speech, which comes after a second.
    assert 600 <= found[0].ms <= 1000
    if piece < 48_000:
        assert most < 4 * 2 * RATE


async def test_half_a_sample_that_stays_is_heard_with_the_other_half() -> None:
    found = []
    for rest in (b"", b"\0"):
        audio = InputAudio(MediaConfig(), MemoryBudget(2**30, lambda: 0).of("a"))
        listener = TurnListener(ServerVad(), audio, VoicePool(), "a", lambda _: None, Playback())
        await audio.append(bytes(RATE) + rest)
        audio.commit(RATE)
        listener.reset()
        await audio.append(said(SENTENCES[1])[len(rest) :])
        found.append([(turn.change, turn.ms) async for turn in listener.turns()])
    assert found[0] == found[1]


def test_silence_is_not_kept() -> None:
    _, most = asyncio.run(listened(bytes(20 * 2 * RATE), ServerVad(), 9600))
    assert most < 2 * RATE


@pytest.mark.parametrize("piece", [9600, 7 * RATE])
def test_a_turn_ends_before_the_buffer_is_full(piece: int) -> None:
    sentence = said(SENTENCES[0], 0.1)[2 * RATE :]
    found, most = asyncio.run(listened(sentence * 8, SemanticVad(eagerness="low"), piece, seconds=6.0))
    assert [turn.change for turn in found[:3]] == ["started", "stopped", "started"]
    # Long pieces push out the beginning.
    longest = 4000 if piece == 9600 else 5000
    assert found[1].ms - found[0].ms == pytest.approx(longest, abs=WINDOW_MS + 1)
    assert most <= 6 * 2 * RATE

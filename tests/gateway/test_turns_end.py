"""The end of a turn as a network hears it: features, silences, the thread, and what sessions tell."""

import asyncio
import sys
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from gateway.fairness.quota import MemoryBudget
from gateway.http.realtime.audio import Playback
from gateway.http.realtime.input_buffers import InputAudio
from gateway.http.realtime.turn_detection import (
    SemanticVad,
    ServerVad,
    Turn,
    TurnListener,
    TurnRules,
    VoicePool,
)
from gateway.http.voice import smart_turn
from gateway.http.voice.resampling import Floats
from gateway.http.voice.smart_turn import MAX_WAITING, SAMPLES, EndDetector, installed_weights, log_mel
from gateway.http.voice.vad import RATE, WINDOW_BYTES
from omnirelay.errors import ConfigError, MissingPackageError
from shared.config import Config, MediaConfig
from tests.gateway.bench import Configure, Log, Patch
from tests.gateway.http_bench import HttpBench, app_of, http_bench, http_gateway, speaking
from tests.gateway.realtime import ANSWER, CHUNKS, append, detect, take, talking
from tests.gateway.test_turns import SENTENCES, said
from tests.support.media import speech


@pytest.fixture(autouse=True)
def patient(monkeypatch: Patch) -> None:
    """A busy machine's verdicts are waited for."""
    monkeypatch.setattr(smart_turn, "LATE_S", 30.0)


class Network:
    """Says what it is told to, and keeps what it heard."""

    def __init__(self, *answers: float) -> None:
        self.answers = list(answers)
        self.heard: list[Floats] = []
        self.free = threading.Event()
        self.free.set()

    def finished(self, samples: Floats) -> float:
        assert self.free.wait(30)
        self.heard.append(samples)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


class Broken:
    def finished(self, samples: Floats) -> float:
        del samples
        raise RuntimeError("no")


class Bench:
    """A detector, and what it reported."""

    def __init__(self, network: "Network | Broken") -> None:
        self.verdicts: list[str] = []
        self.seconds: list[float] = []
        self.detector = EndDetector(network.finished, self.verdicts.append, self.seconds.append)

    async def finished(self, client: str = "a") -> float | None:
        return await self.detector.finished(bytes(4 * WINDOW_BYTES), client)


@pytest.mark.parametrize("seconds", [0.4, 3.0, 8.0, 9.5])
def test_the_features_are_whisper_s(seconds: float) -> None:
    samples = np.tile(speech(SENTENCES[0], RATE), 8)[: int(seconds * RATE)]
    padded = np.pad(samples[-SAMPLES:], (SAMPLES - min(samples.size, SAMPLES), 0))
    whisper = WhisperFeatureExtractor(chunk_length=8)
    wanted = whisper(padded, sampling_rate=RATE, do_normalize=True, return_tensors="np").input_features[0]
    found = log_mel(samples)
    assert found.shape == wanted.shape == (80, 800)
    assert np.abs(found - wanted).max() < 1e-4


@pytest.mark.parametrize(
    ("eagerness", "finished", "wanted"),
    [
        ("auto", None, 700),
        ("auto", 0.5, 0),
        ("auto", 0.49, 2000),
        ("low", 0.79, 4000),
        ("low", 0.8, 0),
        ("high", 0.29, 1000),
        ("high", 0.3, 0),
    ],
)
def test_the_silence_that_ends_a_turn(eagerness: str, finished: float | None, wanted: int) -> None:
    rules = SemanticVad(eagerness=eagerness)  # type: ignore[arg-type]
    assert rules.silence_ms(2000, 0, finished) == wanted
    assert ServerVad().silence_ms(2000, 0, finished) == 500


def test_a_long_pause_lengthens_the_silence_of_who_has_not_finished() -> None:
    rules = SemanticVad()
    assert rules.silence_ms(2000, 2000, 0.1) == pytest.approx(2800)
    assert rules.silence_ms(2000, 3500, 0.1) == 4000
    assert rules.silence_ms(2000, 3500, 0.9) == 0


async def listened(data: bytes, rules: TurnRules, network: Network) -> list[tuple[Turn, float]]:
    """The turns in audio, and how many seconds of it had come by then."""
    audio = InputAudio(MediaConfig(), MemoryBudget(2**30, lambda: 0).of("a"))
    listener = TurnListener(rules, audio, VoicePool(Bench(network).detector), "a", lambda _: None, Playback())
    found = []
    for at in range(0, len(data), WINDOW_BYTES):
        await audio.append(data[at : at + WINDOW_BYTES])
        async for turn in listener.turns():
            found.append((turn, (at + WINDOW_BYTES) / 48_000))
            if turn.change == "stopped":
                audio.drop(turn.position)
    return found


def waits(found: list[tuple[Turn, float]]) -> list[float]:
    """From where each turn's recording ends, which is 190 ms after its speech, to when that was known."""
    return [at - turn.position / 48_000 for turn, at in found if turn.change == "stopped"]


def test_who_has_finished_is_not_waited_for() -> None:
    network = Network(0.9, 0.1)
    data = said(SENTENCES[0]) + said(SENTENCES[1], 4.0)
    found = asyncio.run(listened(data, SemanticVad(), network))
    assert [turn.change for turn, _ in found] == ["started", "paused", "stopped"] * 2
    assert found[0][0].item_id == found[2][0].item_id != found[3][0].item_id == found[5][0].item_id
    first, second = waits(found)
    assert first < 0.04
    assert second == pytest.approx(2.0 - 0.19, abs=0.04)


def test_each_pause_is_heard_and_speech_makes_the_last_one_void() -> None:
    sentence = said(SENTENCES[0], 0.4)[48_000:]
    # Not finished, then unknown to the tracker until the next pause.
    network = Network(0.1, 0.1, 0.9)
    found = asyncio.run(
        listened(bytes(48_000) + sentence * 2 + said(SENTENCES[1])[48_000:], SemanticVad(), network)
    )
    changes = [turn.change for turn, _ in found]
    assert changes == ["started", "paused", "resumed", "paused", "resumed", "paused", "stopped"]
    assert len(network.heard) == 3


def test_the_network_hears_the_turn_with_its_pause_at_most_eight_seconds() -> None:
    network = Network(0.1)
    # Longer than eight seconds, with pauses too short to be heard.
    sentence = said(SENTENCES[0], 0.0)[48_000:]
    asyncio.run(
        listened(
            said(SENTENCES[0], 4.0) + bytes(48_000) + sentence * 8 + bytes(240_000), SemanticVad(), network
        )
    )
    short, long = network.heard[0], network.heard[-1]
    spoken = speech(SENTENCES[0], RATE).size / RATE
    assert spoken < short.size / RATE < spoken + 0.8
    assert long.size == SAMPLES
    for heard in (short, long):
        assert np.abs(heard[-int(0.1 * RATE) :]).max() < 0.01 < np.abs(heard).max()


def test_a_fixed_silence_asks_nobody() -> None:
    network = Network(0.9)
    found = asyncio.run(listened(said(SENTENCES[0]), ServerVad(), network))
    assert network.heard == []
    assert waits(found)[0] == pytest.approx(0.5 - 0.19, abs=0.04)


async def test_a_verdict_is_counted_with_its_time() -> None:
    bench = Bench(Network(0.7, 0.2))
    assert await bench.finished() == 0.7
    assert await bench.finished() == 0.2
    assert bench.verdicts == ["finished", "unfinished"]
    assert len(bench.seconds) == 2


async def test_nobody_waits_for_a_slow_network(caplog: Log, monkeypatch: Patch) -> None:
    monkeypatch.setattr(smart_turn, "LATE_S", 0.05)
    network = Network(0.9)
    network.free.clear()
    bench = Bench(network)
    for _ in range(3):
        assert await bench.finished() is None
    assert bench.verdicts == ["late"] * 3
    monkeypatch.setattr(smart_turn, "LATE_S", 30.0)
    waiting = asyncio.create_task(bench.finished())
    network.free.set()
    assert await waiting == 0.9
    # The first, which could not be stopped, and the last: those between were never begun.
    assert len(network.heard) == 2
    assert "was not heard in 0.1 s: silence ends it" in caplog.text


async def test_of_many_pauses_at_once_some_are_not_heard() -> None:
    network = Network(0.9)
    network.free.clear()
    bench = Bench(network)
    waiting = [asyncio.create_task(bench.finished(str(client))) for client in range(MAX_WAITING)]
    await asyncio.sleep(0)
    assert await bench.finished() is None
    assert bench.verdicts == ["busy"]
    network.free.set()
    assert await asyncio.gather(*waiting) == [0.9] * MAX_WAITING


def test_a_network_that_fails_is_told_of_and_done_without(caplog: Log) -> None:
    bench = Bench(Broken())
    assert asyncio.run(bench.finished()) is None
    assert bench.verdicts == ["failed"]
    assert "could not be heard: silence ends it" in caplog.text
    assert "RuntimeError: no" in caplog.text


def test_without_its_package_there_are_no_sessions(tmp_path: Path) -> None:
    config = Config.model_validate({"gateway": {"turn_model": str(tmp_path / "model.onnx")}})
    with (
        mock.patch.dict(sys.modules, {"onnxruntime": None}),
        pytest.raises(MissingPackageError, match=r"omnirelay-server\[turns\]"),
    ):
        app_of(config)


def test_weights_that_are_nowhere(monkeypatch: Patch) -> None:
    monkeypatch.setattr("gateway.http.voice.smart_turn._DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ConfigError, match="pip install --no-deps no-such-distribution"):
        installed_weights()


async def test_a_session_says_which_and_answers_at_once(configure: Configure, monkeypatch: Patch) -> None:
    network = Network(0.9)
    monkeypatch.setattr("gateway.http.realtime.endpoint.SmartTurn", lambda _: network)

    config = configure({**http_gateway(), "turn_model": "model.onnx"})
    async with http_bench(config) as b, speaking(b, ANSWER, CHUNKS), talking(b) as c:
        assert (await detect(c, {"type": "semantic_vad"})).end_of_turn == "model"
        assert not hasattr(await detect(c, {"type": "server_vad"}), "end_of_turn")
        await detect(c, {"type": "semantic_vad"})
        # Too short a silence to end it otherwise.
        await append(c, said(SENTENCES[0], 0.3))
        assert (await take(c, "response.done"))[-1].response.status == "completed"
        assert await b.metric('omnirelay_turn_ends_heard_total{verdict="finished"}') == 1


async def test_a_session_says_that_silence_ends_its_turns(web: HttpBench) -> None:
    async with talking(web) as c:
        assert (await detect(c, {"type": "semantic_vad"})).end_of_turn == "silence"

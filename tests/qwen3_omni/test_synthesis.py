"""The engine that makes frames audio: streams of chunks sound as transformers' code2wav in one piece."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from omnirelay.errors import CheckpointError
from services.families.qwen3_omni import voices
from services.families.qwen3_omni.code2wav import TOKEN2WAV
from services.token2wav.chunks import AudioStream
from services.token2wav.engine import SynthesisEngine, build_token2wav
from shared.config import SynthesisConfig
from tests.qwen3_omni.tiny import CODES, GROUPS, Reference
from tests.token2wav.support import config_of, run_all, spoken

TOLERANCE = 1e-4


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> SynthesisEngine:
    return build_token2wav(TOKEN2WAV, checkpoint, config_of(1, 45, batch=4))


def frames_of(count: int, seed: int) -> torch.Tensor:
    """Codec ids ``[frames, groups]``."""
    return torch.randint(CODES, (count, GROUPS), generator=torch.Generator().manual_seed(seed))


def whole(reference: Reference, frames: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        audio: torch.Tensor = reference.model.code2wav(frames.T[None])[0, 0]
    return audio


def stream_of(sizes: Sequence[int], engine: SynthesisEngine) -> AudioStream:
    return AudioStream(spoken(1, sizes, "ethan"), SynthesisConfig(), engine.geometry)


@pytest.mark.parametrize("sizes", [(), (1,), (1, 2, 8), (7, 3)], ids=str)
def test_streams_at_once_sound_as_each_in_one_piece(
    engine: SynthesisEngine, reference: Reference, sizes: Sequence[int]
) -> None:
    streams = {name: frames_of(length, length) for name, length in (("a", 19), ("b", 8), ("c", 1))}
    open_streams = {name: stream_of(sizes, engine) for name in streams}
    for name, frames in streams.items():
        open_streams[name].extend(frames.flatten().tolist())
        open_streams[name].end()
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in streams}
    while open_streams:
        for name, stream in open_streams.items():
            chunk = stream.next_chunk()
            assert chunk is not None
            engine.submit_chunk(name, chunk)
        for name, audio in run_all(engine).items():
            assert open_streams[name].accept_chunk()
            parts[name].append(audio)
        open_streams = {name: stream for name, stream in open_streams.items() if not stream.finished}
    for name, frames in streams.items():
        expected = whole(reference, frames)
        assert expected.abs().max() > 0.01, "silence is no test"
        torch.testing.assert_close(torch.cat(parts[name]), expected, atol=TOLERANCE, rtol=0)


def test_a_chunk_that_is_wanted_for_what_it_leaves_alone(
    engine: SynthesisEngine, reference: Reference
) -> None:
    frames = frames_of(12, 5)
    stream = AudioStream(spoken(1, (4,), "ethan"), SynthesisConfig(), engine.geometry, delivered=(4, 4))
    stream.extend(frames.flatten().tolist())
    stream.end()
    made = []
    while not stream.finished:
        chunk = stream.next_chunk()
        assert chunk is not None
        engine.submit_chunk("again", chunk)
        audio = run_all(engine)["again"]
        if stream.accept_chunk():
            made.append(audio)
        else:
            assert chunk.silent == (audio.numel() == 0)
    expected = whole(reference, frames)
    last = torch.cat(made)
    torch.testing.assert_close(last, expected[len(expected) - len(last) :], atol=TOLERANCE, rtol=0)
    assert len(last) == 4 * engine.geometry.unit_samples


def test_voices_are_those_of_the_configuration(checkpoint: Path, tmp_path: Path) -> None:
    assert sorted(voices(checkpoint)) == ["aiden", "chelsie", "ethan"]
    (tmp_path / "config.json").write_text('{"talker_config": {"speaker_id": {}}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="names no voices"):
        voices(tmp_path)

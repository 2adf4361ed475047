"""How trained speech sounds: chunks join without clicks, and bfloat16 changes little."""

from collections.abc import Iterator
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from services.families.qwen2_5_omni.token2wav.dit import HalfLinear
from services.families.qwen2_5_omni.token2wav.model import TOKEN2WAV
from services.token2wav import engine as token2wav_engine
from services.token2wav.chunks import AudioStream
from services.token2wav.engine import SynthesisEngine, build_token2wav
from shared.config import SynthesisConfig
from tests.token2wav.support import MAX_BATCH_FRAMES, Oracle, config_of, run_all, runner_of, spoken

# fmt: off
CODES = [
    366, 149, 247, 247, 6, 886, 323, 703, 684, 799, 274, 452, 1010, 747, 791, 513, 506, 506, 150,
    150, 150, 317, 228, 132, 900, 706, 263, 263, 913, 915, 231, 372, 622, 675, 713, 542, 407, 681,
    325, 449, 603, 348, 71, 71, 406, 430, 821, 440, 435, 1007, 823, 99, 99, 640, 288, 934, 526, 100,
    100, 100, 12, 34, 34, 678, 678, 106, 106, 904, 683, 236, 98, 734, 412, 341, 929, 875, 76, 440,
    216, 1007, 99, 99, 288, 793, 42, 526, 12, 34, 117, 562, 469, 776, 357, 199, 513, 370, 762, 762,
    762, 132, 411, 282, 241, 241, 241, 457, 492, 938, 458, 624, 62,
]
# fmt: on
"""What the trained checkpoint's talker said, sampled: "eighteen minus four is fourteen"."""
NEAR, FAR, MILLISECOND = 120, 720, 24
"""Samples on either side of a border."""


@pytest.fixture(scope="session")
def trained(speaking_checkpoint) -> SynthesisEngine:
    return build_token2wav(TOKEN2WAV, speaking_checkpoint, config_of(2000, batch=2))


def chunks(engine, sizes, mode="stream") -> list[NDArray[np.float32]]:
    speech = msgspec.structs.replace(spoken(1013, sizes), streaming=mode == "stream")
    stream = AudioStream(speech, SynthesisConfig(), engine.geometry)
    stream.extend(CODES)
    stream.end()
    made = []
    while (chunk := stream.next_chunk()) is not None:
        engine.submit_chunk("stream", chunk)
        waveform = run_all(engine)["stream"].numpy()
        if stream.accept_chunk():
            made.append(waveform)
    return made


def jump(samples: NDArray[np.float32], border: int) -> float:
    """The step at a border, as a multiple of the largest one within 5 ms."""
    steps = np.abs(np.diff(samples))
    around = np.r_[steps[border - NEAR : border - 1], steps[border : border + NEAR]]
    return float(steps[border - 1] / around.max())


def burst(samples: NDArray[np.float32], border: int) -> float:
    """The energy over 9 kHz in 2 ms at a border, as a multiple of that of the loudest 2 ms near it."""
    at = np.arange(127) - 63
    high = (np.equal(at, 0) - 0.75 * np.sinc(0.75 * at)) * np.hanning(at.size)
    energy = np.convolve(samples, high, "same") ** 2
    around = np.r_[energy[border - FAR : border - NEAR], energy[border + NEAR : border + FAR]]
    pieces = around.reshape(-1, 2 * MILLISECOND).mean(axis=1)
    return float(energy[border - MILLISECOND : border + MILLISECOND].mean() / pieces.max())


def test_borders_do_not_click(trained: SynthesisEngine) -> None:
    [whole] = chunks(trained, (), mode="offline")
    for sizes in ([12], [12, 24, 48]):
        parts = chunks(trained, sizes)
        borders = np.cumsum([part.size for part in parts])[:-1].tolist()
        assert len(borders) >= 3
        for samples in (whole, np.concatenate(parts)):
            assert max(jump(samples, border) for border in borders) < 1.2
            assert max(burst(samples, border) for border in borders) < 2


MOST = 0.02
"""Of the sound's power, as amplitude; 1% was measured with the trained checkpoint."""


@pytest.fixture
def half(oracle: Oracle) -> Iterator[SynthesisEngine]:
    """An engine that takes the CPU for a GPU."""
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    there = mock.Mock(is_cpu=lambda: False, is_cuda=lambda: False)
    with mock.patch.object(token2wav_engine, "current_platform", there):
        config = config_of(MAX_BATCH_FRAMES, precision="bfloat16")
        yield token2wav_engine.build_token2wav(TOKEN2WAV, oracle.path, config)
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]


def model_of(engine: SynthesisEngine) -> torch.nn.Module:
    model: torch.nn.Module = runner_of(engine).get_model()
    return model


def sound(engine: SynthesisEngine, oracle: Oracle) -> torch.Tensor:
    engine.submit_chunk("a", oracle.chunk(60))
    return run_all(engine)["a"]


def test_only_projections_of_the_blocks_are_halves_and_the_sound_is_nearly_the_same(
    half: SynthesisEngine, engine: SynthesisEngine, oracle: Oracle
) -> None:
    whole = sound(engine, oracle)
    difference = sound(half, oracle) - whole
    assert 0 < difference.square().mean().sqrt() < MOST * whole.square().mean().sqrt()
    halves = [name for name, each in model_of(half).named_parameters() if each.dtype == torch.bfloat16]
    layers = [name for name, each in model_of(half).named_modules() if isinstance(each, HalfLinear)]
    assert sorted(halves) == sorted(f"{name}.{part}" for name in layers for part in ("weight", "bias"))
    assert all(".transformer_blocks." in name or name.endswith("proj_out") for name in layers)
    assert {each.dtype for each in model_of(engine).parameters()} == {torch.float32}
    assert torch.backends.cudnn.allow_tf32

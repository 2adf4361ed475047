"""Chunks of speech that was trained join without clicks; random weights do not click."""

import numpy as np
import pytest
from numpy.typing import NDArray

from services.families.qwen2_5_omni.token2wav.family import TOKEN2WAV
from services.token2wav.chunks import ChunkingConfig
from services.token2wav.engine import SynthesisEngine, build_token2wav
from services.token2wav.stream import AudioStream, VoiceSettings
from tests.token2wav.support import run_all

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
    return build_token2wav(TOKEN2WAV, speaking_checkpoint, max_batch_frames=2000, max_num_seqs=2)


def chunks(engine, sizes, mode="stream") -> list[NDArray[np.float32]]:
    voice = VoiceSettings(seed=1013, speaker="Ethan")
    stream = AudioStream(voice, ChunkingConfig(mode=mode), engine.geometry, sizes)
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


@pytest.mark.parametrize("sizes", [[12], [12, 24, 48]])
def test_borders_do_not_click(trained: SynthesisEngine, sizes: list[int]) -> None:
    parts = chunks(trained, sizes)
    borders = np.cumsum([part.size for part in parts])[:-1].tolist()
    [whole] = chunks(trained, (), mode="offline")
    streamed = np.concatenate(parts)
    assert len(borders) >= 3
    for samples in (whole, streamed):
        assert max(jump(samples, border) for border in borders) < 1.2
        assert max(burst(samples, border) for border in borders) < 2

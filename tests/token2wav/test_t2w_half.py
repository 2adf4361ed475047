"""Products of the solver in bfloat16, as a GPU's token2wav can have them."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from services.families.qwen2_5_omni.token2wav.dit import HalfLinear
from services.families.qwen2_5_omni.token2wav.family import TOKEN2WAV
from services.token2wav import engine as token2wav_engine
from services.token2wav.engine import SynthesisEngine
from tests.token2wav.support import MAX_BATCH_FRAMES, Oracle, run_all

MOST = 0.02
"""Of the sound's power, as amplitude; 1% was measured with the trained checkpoint."""


@pytest.fixture
def half(oracle: Oracle) -> Iterator[SynthesisEngine]:
    """An engine that takes the CPU for a GPU."""
    kept = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    there = mock.Mock(is_cpu=lambda: False, is_cuda=lambda: False)
    with mock.patch.object(token2wav_engine, "current_platform", there):
        yield token2wav_engine.build_token2wav(
            TOKEN2WAV,
            oracle.path,
            max_batch_frames=MAX_BATCH_FRAMES,
            max_num_seqs=8,
            precision="bfloat16",
        )
    torch.set_float32_matmul_precision(kept[0])
    torch.backends.cudnn.allow_tf32 = kept[1]


def model_of(engine: SynthesisEngine) -> torch.nn.Module:
    runner = engine._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    model: torch.nn.Module = runner.get_model()
    return model


def sound(engine: SynthesisEngine, oracle: Oracle) -> torch.Tensor:
    engine.submit_chunk("a", oracle.chunk(60))
    return run_all(engine)["a"]


def test_the_sound_is_nearly_the_same(half: SynthesisEngine, engine: SynthesisEngine, oracle: Oracle) -> None:
    whole = sound(engine, oracle)
    difference = sound(half, oracle) - whole
    assert 0 < difference.square().mean().sqrt() < MOST * whole.square().mean().sqrt()


def test_only_projections_of_the_blocks_are_halves(half: SynthesisEngine, engine: SynthesisEngine) -> None:
    halves = [name for name, each in model_of(half).named_parameters() if each.dtype == torch.bfloat16]
    layers = [name for name, each in model_of(half).named_modules() if isinstance(each, HalfLinear)]
    assert sorted(halves) == sorted(f"{name}.{part}" for name in layers for part in ("weight", "bias"))
    assert all(".transformer_blocks." in name or name.endswith("proj_out") for name in layers)
    assert {each.dtype for each in model_of(engine).parameters()} == {torch.float32}
    assert torch.backends.cudnn.allow_tf32

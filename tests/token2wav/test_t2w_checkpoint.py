"""What is read from a checkpoint or comes from a caller is not believed."""

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config

from omnirelay.errors import CheckpointError, InvalidRequestError
from services.families.qwen2_5_omni.token2wav.conditioning import check_speakers
from services.families.qwen2_5_omni.token2wav.model import TOKEN2WAV, Token2WavForSynthesis
from services.families.qwen2_5_omni.token2wav.synthesizer import SolverWork
from services.families.qwen2_5_omni.voices import load_speakers
from services.token2wav.chunks import CodecGeometry
from services.token2wav.engine import build_token2wav
from shared.config import SynthesisConfig, Token2WavConfig

GOOD = {"cond": torch.zeros(1, 16), "ref_mel": torch.zeros(1, 30, 80), "bos_token": 5}


def test_speakers_must_fit_the_transformer(oracle, tmp_path):
    config = oracle.model.config.dit_config
    for change, problem in (
        ({"cond": torch.zeros(1, 17)}, "cond has 17"),
        ({"ref_mel": torch.zeros(1, 4, 80)}, "ref_mel has shape"),
        ({"ref_mel": torch.zeros(1, 30, 79)}, "ref_mel has shape"),
    ):
        torch.save({"Ada": GOOD | change}, tmp_path / "spk_dict.pt")
        with pytest.raises(CheckpointError, match=f"Ada.{problem}"):
            check_speakers(load_speakers(tmp_path), config, tmp_path)


def loaded_with(engine, weights) -> set[str]:
    # A model of its own: vLLM has packed the engine's weights for its kernels.
    config = engine._engine.vllm_config
    with set_current_vllm_config(config):
        return Token2WavForSynthesis(vllm_config=config).load_weights(weights)


def test_weights_are_loaded_strictly(oracle, engine):
    weights = load_file(oracle.path / "model.safetensors")
    assert loaded_with(engine, weights.items())
    missing = "token2wav.code2wav_dit_model.transformer_blocks.1.attn.to_k.weight"
    with pytest.raises(CheckpointError, match=f"1 tensors are missing, the first is {missing}"):
        loaded_with(engine, [item for item in weights.items() if item[0] != missing])
    unknown = [*weights.items(), ("token2wav.code2wav_dit_model.surprise", torch.zeros(1))]
    with pytest.raises(CheckpointError, match="surprise"):
        loaded_with(engine, unknown)
    with pytest.raises(CheckpointError):
        loaded_with(engine, [(missing, torch.zeros(3, 3))])
    computed = [*weights.items(), ("token2wav.code2wav_dit_model.rotary_embed.inv_freq", torch.zeros(8))]
    assert loaded_with(engine, computed)


def test_engine_needs_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        build_token2wav(TOKEN2WAV, tmp_path, Token2WavConfig())


@pytest.mark.parametrize(
    ("codes", "problem"),
    [((1, 65), r"codes\[1\]: codec id 65 is not in 0..64"), ((-1,), r"codes\[0\]: codec id -1")],
)
def test_bad_codes_are_refused(oracle, codes, problem):
    with pytest.raises(InvalidRequestError, match=problem):
        SolverWork.of(oracle.model.config, SynthesisConfig()).geometry.check_codes(codes)


def test_codes_that_are_no_whole_frames_are_refused():
    two_groups = CodecGeometry(block_size=2, repeats=1, max_frames=10, unit_samples=240, groups=2, ids=8)
    two_groups.check_codes((0, 7, 3, 3))
    with pytest.raises(InvalidRequestError, match="3 ids are no whole frames of 2"):
        two_groups.check_codes((0, 7, 3))

"""What is read from a checkpoint or comes from a caller is not believed."""

import pytest
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config

from omnirelay.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    StageFailedError,
    StateTransitionError,
    UnknownSpeakerError,
)
from services.families.qwen2_5_omni.token2wav.conditioning import check_speakers
from services.families.qwen2_5_omni.token2wav.family import TOKEN2WAV, geometry
from services.families.qwen2_5_omni.token2wav.model import Token2WavForSynthesis
from services.families.qwen2_5_omni.token2wav.synthesis import SolverWork
from services.families.qwen2_5_omni.voices import load_speakers
from services.token2wav.chunks import CodecGeometry
from services.token2wav.engine import build_token2wav
from services.token2wav.family import Budget
from services.token2wav.synthesis import pack_failure, pack_waveform, unpack_waveform


def work_of(oracle):
    return SolverWork(geometry(oracle.model.config), Budget(1, 1))


def test_speakers_are_read_in_order(oracle):
    speakers = load_speakers(oracle.path)
    assert list(speakers) == ["Chelsie", "Ethan"]
    assert speakers["Ethan"].bos_token == 90
    assert torch.equal(speakers["Ethan"].ref_mel, oracle.speakers["Ethan"]["ref_mel"])


GOOD = {"cond": torch.zeros(1, 16), "ref_mel": torch.zeros(1, 30, 80), "bos_token": 5}


@pytest.mark.parametrize(
    ("voices", "problem"),
    [
        ({}, "at least one voice"),
        ([1], "dictionary"),
        ({"Ada": 3}, "'Ada'"),
        ({"Ada": {**GOOD, "cond": None}}, "Ada.cond"),
        ({"Ada": {**GOOD, "cond": torch.zeros(2, 16)}}, r"Ada.cond has shape \[2, 16\]"),
        ({"Ada": {**GOOD, "cond": torch.full((1, 16), float("nan"))}}, "Ada.cond.*finite"),
        ({"Ada": {**GOOD, "ref_mel": torch.zeros(1, 0, 80)}}, "Ada.ref_mel"),
        ({"Ada": {**GOOD, "bos_token": 1.5}}, "Ada.bos_token"),
        ({"Ada": {key: GOOD[key] for key in ("cond", "ref_mel")}}, "Ada.bos_token"),
    ],
)
def test_bad_speaker_files_are_refused(tmp_path, voices, problem):
    torch.save(voices, tmp_path / "spk_dict.pt")
    with pytest.raises(CheckpointError, match=f"spk_dict.pt.*{problem}"):
        load_speakers(tmp_path)


def test_missing_and_malicious_speaker_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        load_speakers(tmp_path)
    (tmp_path / "spk_dict.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=r"spk_dict\.pt"):
        load_speakers(tmp_path)


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


def test_engine_needs_a_checkpoint_and_bounds(tmp_path, oracle):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        build_token2wav(TOKEN2WAV, tmp_path, max_batch_frames=1, max_num_seqs=1)
    with pytest.raises(ConfigError, match="max_batch_frames 0"):
        build_token2wav(TOKEN2WAV, oracle.path, max_batch_frames=0, max_num_seqs=1)
    with pytest.raises(ConfigError, match="max_vocoder_frames 0"):
        build_token2wav(TOKEN2WAV, oracle.path, max_batch_frames=1, max_num_seqs=1, max_vocoder_frames=0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"codes": ()}, "empty or not within"),
        ({"codes": (0,) * 201}, "402 mel frames exceeds the 400"),
        ({"start": 12, "target_end": 14}, "block border"),
        ({"target_end": 11}, "not within"),
        ({"target_end": 8}, "not the end"),
        ({"time_points": 1}, "time_points 1"),
        ({"time_points": 258}, "time_points 258"),
        ({"seed": 2**64}, "seed"),
        ({"guidance_scale": float("nan")}, "guidance_scale nan"),
        ({"sway_coefficient": float("inf")}, "sway_coefficient inf"),
        ({"due": float("nan")}, "due nan"),
        ({"is_last": False}, "target_end 10 of a chunk before others cuts a block"),
    ],
)
def test_bad_chunks_are_refused(oracle, changes, problem):
    with pytest.raises(InvalidRequestError, match=problem):
        work_of(oracle).check(oracle.chunk(5, **changes))


@pytest.mark.parametrize(
    ("codes", "problem"),
    [
        ((1, 65), r"codes\[1\]: codec id 65 is not in 0..64"),
        ((-1,), r"codes\[0\]: codec id -1"),
    ],
)
def test_bad_codes_are_refused(oracle, codes, problem):
    with pytest.raises(InvalidRequestError, match=problem):
        geometry(oracle.model.config).check_codes(codes)


def test_codes_that_are_no_whole_frames_are_refused():
    two_groups = CodecGeometry(block_size=2, repeats=1, max_frames=10, unit_samples=240, groups=2, ids=8)
    two_groups.check_codes((0, 7, 3, 3))
    with pytest.raises(InvalidRequestError, match="3 ids are no whole frames of 2"):
        two_groups.check_codes((0, 7, 3))


def test_the_longest_window_is_accepted(oracle):
    work_of(oracle).check(oracle.chunk(200))


def test_samples_survive_packing():
    waveform = torch.randn(480)
    assert torch.equal(unpack_waveform(pack_waveform(waveform)), waveform)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("codes[3]: é"), InvalidRequestError),
        (UnknownSpeakerError("no voice"), UnknownSpeakerError),
        (StageFailedError(""), StageFailedError),
        (StateTransitionError("line\nline"), StageFailedError),
    ],
)
def test_failures_survive_packing(error, kind):
    packed = pack_failure(error)
    with pytest.raises(kind) as caught:
        unpack_waveform(packed)
    assert type(caught.value) is kind
    assert str(caught.value) == str(error)


@pytest.mark.parametrize(
    "packed", [torch.zeros(1), torch.zeros(2, 2), torch.zeros(8), torch.zeros(9).double()]
)
def test_what_is_no_result_is_refused(packed):
    with pytest.raises(StageFailedError):
        unpack_waveform(packed + 0 if packed.numel() != 8 else torch.ones(8))

"""Recordings cut into windows: the encoder's output for them is that for the whole."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems

from services.families.qwen_media.features import (
    audio_tokens,
    clamp_by_window,
    cut_windows,
    log_mel_of,
    window_frames,
)

TOLERANCE = 1e-5


def encoder_of(n_window: int) -> Any:
    """A small encoder with random weights."""
    torch.manual_seed(n_window)
    config = Qwen2_5OmniAudioEncoderConfig(
        num_mel_bins=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=32,
        d_model=32,
        output_dim=24,
        n_window=n_window,
        max_source_positions=4 * n_window,
    )
    return Qwen2_5OmniAudioEncoder(config).eval()


ENCODERS = {n_window: encoder_of(n_window) for n_window in (100, 6, 5, 1)}


def encode(encoder: Any, *pieces: torch.Tensor) -> torch.Tensor:
    """The encoder's output for sounds that it is given together."""
    lengths = torch.tensor([piece.shape[1] for piece in pieces])
    with torch.inference_mode():
        output = encoder(torch.cat(pieces, dim=1), feature_lens=lengths)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def item_of(mel: torch.Tensor) -> MultiModalKwargsItem:
    """A whole recording as vLLM's processor gives it."""
    length = torch.tensor([mel.shape[1]])
    (item,) = MultiModalKwargsItems.from_hf_inputs(
        {"input_audio_features": mel, "audio_feature_lengths": length},
        {
            "input_audio_features": MultiModalFieldConfig.flat_from_sizes("audio", length, dim=1),
            "audio_feature_lengths": MultiModalFieldConfig.batched("audio", keep_on_cpu=True),
        },
    )["audio"]
    return item


def noise(frames: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(16, frames)).astype(np.float32))


@settings(max_examples=80, deadline=None)
@given(n_window=st.sampled_from(sorted(ENCODERS)), frames=st.integers(3, 1300), seed=st.integers(0, 99))
def test_the_encoder_gives_the_same_for_windows_alone_as_for_the_whole(
    n_window: int, frames: int, seed: int
) -> None:
    encoder, mel = ENCODERS[n_window], noise(frames, seed)
    whole = encode(encoder, mel)
    windows = list(cut_windows(item_of(mel), window_frames(n_window)))
    pieces = [window.data["input_audio_features"].data for window in windows]
    assert [audio_tokens(piece.shape[1]) for piece in pieces] == [window.tokens for window in windows]
    assert sum(window.tokens for window in windows) == whole.shape[0] == audio_tokens(frames)
    alone = torch.cat([encode(encoder, piece) for piece in pieces])
    assert float((alone - whole).abs().max()) < TOLERANCE
    # In one step they are one call, as the whole is: equal to the last bit, without a remainder that is cut.
    if sum(piece.shape[1] for piece in pieces) == frames:
        assert torch.equal(encode(encoder, *pieces), whole)


@given(frames=st.integers(1, 900), changed=st.integers(0, 899), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_windows_are_named_by_their_features(frames: int, changed: int, seed: int) -> None:
    mel = noise(frames, seed)
    names = [window.digest for window in cut_windows(item_of(mel), 200)]
    assert names == [window.digest for window in cut_windows(item_of(mel.clone()), 200)]
    # What follows changes no window that is complete.
    longer = torch.cat([mel, noise(333, seed + 1)], dim=1)
    complete = frames // 200
    assert [window.digest for window in cut_windows(item_of(longer), 200)][:complete] == names[:complete]
    if changed < frames and changed // 200 < len(names):
        mel[3, changed] += 0.001
        others = [window.digest for window in cut_windows(item_of(mel), 200)]
        assert [at for at, name in enumerate(names) if others[at] != name] == [changed // 200]


def test_a_part_of_a_window_has_another_name_than_the_whole_window() -> None:
    silent = torch.full((16, 450), -1.5)
    first, second, third = cut_windows(item_of(silent), 200)
    assert first.digest == second.digest != third.digest


@pytest.mark.parametrize(("n_window", "frames"), [(100, 200), (50, 100), (25, 100), (1, 4), (6, 12)])
def test_a_window_has_whole_tokens(n_window: int, frames: int) -> None:
    assert window_frames(n_window) == frames
    assert 4 * audio_tokens(frames) == frames


EXTRACTOR = WhisperFeatureExtractor(feature_size=128)


def reference_mel(samples: NDArray[np.float32]) -> torch.Tensor:
    """transformers' features of a recording and a second of silence behind it."""
    padding = {"padding": "max_length", "max_length": len(samples) + 16_000}
    found = EXTRACTOR(samples, sampling_rate=16_000, return_tensors="pt", **padding)
    features: torch.Tensor = found["input_features"][0]
    return features


def quiet_then_loud(loud_at: int, length: int = 90_000) -> NDArray[np.float32]:
    generator = np.random.default_rng(loud_at)
    samples = generator.normal(0, 1e-4, length) * np.linspace(1, 30, length)
    samples[loud_at : loud_at + 2000] += 0.9 * np.sin(np.arange(2000) / 3)
    return samples.astype(np.float32)


@settings(max_examples=12, deadline=None)
@given(loud_at=st.integers(0, 86_000))
def test_clamped_by_the_whole_recording_mel_frames_are_transformers(loud_at: int) -> None:
    samples = quiet_then_loud(loud_at)
    log_mel = log_mel_of(samples, EXTRACTOR)
    assert torch.equal(clamp_by_window(log_mel, log_mel.shape[1]), reference_mel(samples))


@settings(max_examples=12, deadline=None)
@given(loud_at=st.integers(0, 86_000), stop=st.integers(50_000, 90_000))
def test_the_causal_clamp_depends_on_nothing_that_comes_later(loud_at: int, stop: int) -> None:
    samples = quiet_then_loud(loud_at)
    whole = clamp_by_window(log_mel_of(samples, EXTRACTOR), 200)
    begun = clamp_by_window(log_mel_of(samples[:stop], EXTRACTOR), 200)
    # Windows that end 0.12 s before the recording does.
    frames = (stop // 160 - 12) // 200 * 200
    assert torch.equal(whole[:, :frames], begun[:, :frames])
    reference = reference_mel(samples)
    if loud_at < 30_000:
        assert torch.equal(whole, reference)
    assert float((whole - reference).max()) <= 0

"""Features are bit for bit those of transformers' own processor, and sounds are cut into windows."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import Qwen2_5OmniProcessor, WhisperFeatureExtractor
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniAudioEncoderConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItem, MultiModalKwargsItems

from omnirelay.errors import MediaError
from services.families.qwen_media.media import (
    FeatureExtractor,
    Features,
    Piece,
    Windows,
    clamp_by_window,
    log_mel_of,
)
from services.thinker.media.decoded import DecodedAudio, DecodedImage, DecodedVideo
from shared.messages import MediaKind
from tests.support.media import drawing, motion, speech
from tests.support.thinking import ThinkerRig


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint: Path) -> Qwen2_5OmniProcessor:
    return Qwen2_5OmniProcessor.from_pretrained(tiny_checkpoint)


@pytest.fixture
def extractor(thinker: ThinkerRig) -> FeatureExtractor:
    return FeatureExtractor(thinker.engine)


@pytest.fixture
def causal(thinker: ThinkerRig) -> FeatureExtractor:
    return FeatureExtractor(thinker.engine, "causal")


@pytest.mark.parametrize("length", [480, 481, 639, 1234, 15_999, 16_000, 16_001, 32_000, 40_017])
def test_sound(extractor: FeatureExtractor, theirs: Qwen2_5OmniProcessor, length: int) -> None:
    samples = speech()[5_000 : 5_000 + length]
    windows = features_of(extractor.extract("file", DecodedAudio(samples), "audio 1"))
    expected = theirs(text="<|AUDIO|>", audio=[samples], return_tensors="pt")
    frames = int(expected["feature_attention_mask"].sum())
    mel = torch.cat([window.data["input_audio_features"].data for window in windows], dim=1)
    assert torch.equal(mel, expected["input_features"][0, :, :frames])
    lengths = [int(window.data["audio_feature_lengths"].data) for window in windows]
    assert lengths[:-1] == [200] * (len(windows) - 1)
    assert sum(lengths) == frames
    assert sum(window.tokens for window in windows) == expected["input_ids"].shape[1]
    assert sum(window.nbytes for window in windows) >= frames * 128 * 4


def features_of(pieces: Sequence[Piece], kind: MediaKind | None = None) -> list[Features]:
    return [each for piece in pieces for each in piece.features if kind in {None, each.kind}]


def mel_of(pieces: Sequence[Piece]) -> torch.Tensor:
    windows = features_of(pieces, "audio")
    return torch.cat([window.data["input_audio_features"].data for window in windows], dim=1)


def digests(pieces: Sequence[Piece]) -> list[str]:
    return [each.digest for each in features_of(pieces)]


def louder_at(start: int, seconds: float = 6.5) -> NDArray[np.float32]:
    """Speech with the loudest moment at this sample."""
    samples = 0.05 * np.tile(speech(), 3)[: int(seconds * 16_000)]
    samples[start : start + 800] = 0.9 * np.sin(np.arange(800) / 2)
    return samples.astype(np.float32)


def test_the_causal_clamp_is_the_references_where_the_loudest_moment_is_in_the_first_window(
    extractor: FeatureExtractor, causal: FeatureExtractor
) -> None:
    for samples in (louder_at(9_000), speech()[:30_000]):
        theirs, ours = (
            each.extract("file", DecodedAudio(samples), "audio 1") for each in (extractor, causal)
        )
        assert torch.equal(mel_of(ours), mel_of(theirs))
        assert digests(ours) == digests(theirs)


def test_with_the_causal_clamp_a_louder_moment_changes_nothing_before_its_window(
    extractor: FeatureExtractor, causal: FeatureExtractor
) -> None:
    samples = louder_at(85_000)
    for each, changes in ((extractor, True), (causal, False)):
        # Both have the silence behind the end that the look-ahead needs.
        begun = each.extract("file", DecodedAudio(samples[:70_000]), "audio 1")
        whole = each.extract("file", DecodedAudio(samples), "audio 1")
        settled_before = digests(each.windows.settled(begun))
        assert len(settled_before) == 2
        assert (digests(whole)[:2] != settled_before) == changes


@pytest.mark.parametrize(("width", "height"), [(320, 240), (30, 30), (2000, 40), (8, 8), (33, 1000)])
def test_pictures(extractor: FeatureExtractor, theirs: Qwen2_5OmniProcessor, width: int, height: int) -> None:
    image = drawing(4, width, height)
    (features,) = features_of(extractor.extract("file", DecodedImage(np.array(image)), "image 1"))
    expected = theirs(text="<|IMAGE|>", images=[image], return_tensors="pt")
    assert torch.equal(features.data["pixel_values"].data, expected["pixel_values"])
    assert features.data["image_grid_thw"].data.tolist() == expected["image_grid_thw"][0].tolist()
    assert features.tokens == expected["input_ids"].shape[1]


@pytest.mark.parametrize("heard", [True, False])
def test_videos(extractor: FeatureExtractor, theirs: Qwen2_5OmniProcessor, heard: bool) -> None:
    frames = np.array(motion(3.5, 2, 200, 112))
    samples = speech()[:50_000]
    pieces = extractor.extract("file", DecodedVideo(frames, samples if heard else None), "video 1")
    expected = theirs(
        text="<|vision_bos|><|VIDEO|><|vision_eos|>",
        videos=[frames],
        audio=[samples] if heard else None,
        use_audio_in_video=heard,
        return_tensors="pt",
    )
    pictures = features_of(pieces, "video")
    # 3.1 s of sound and 4 s of pictures are two windows, each with pictures.
    assert [[each.kind for each in piece.features] for piece in pieces] == (
        [["video", "audio"], ["video", "audio"]] if heard else [["video"]]
    )
    seen = torch.cat([each.data["pixel_values_videos"].data for each in pictures])
    assert torch.equal(seen, expected["pixel_values_videos"])
    grids = [each.data["video_grid_thw"].data for each in pictures]
    assert sum(int(grid[0]) for grid in grids) == int(expected["video_grid_thw"][0, 0])
    assert {tuple(grid[1:].tolist()) for grid in grids} == {tuple(expected["video_grid_thw"][0, 1:].tolist())}
    assert float(pictures[0].data["second_per_grid_ts"].data) == float(expected["video_second_per_grid"][0])
    around = 4 if heard else 2
    assert sum(each.tokens for each in features_of(pieces)) == expected["input_ids"].shape[1] - around
    if heard:
        mask = expected["feature_attention_mask"][0].bool()
        assert torch.equal(mel_of(pieces), expected["input_features"][0][:, mask])


def test_parts_of_a_video_are_named_by_their_frames_and_sound(extractor: FeatureExtractor) -> None:
    frames, samples = np.array(motion(6.0, 2, 64, 64)), speech()[:80_000]
    whole, begun = (
        extractor.extract("file", DecodedVideo(frames[:count], samples[: count * 8000]), "video 1")
        for count in (10, 8)
    )
    changed = frames.copy()
    changed[5, 0, 0] ^= 255
    other = extractor.extract("file", DecodedVideo(changed[:10], samples), "video 1")
    names = [digests([piece]) for piece in whole]
    assert len(names) == len({*map(tuple, names)}) == 3
    assert digests(begun)[0] == names[0][0]
    assert [digests([piece]) == name for piece, name in zip(other, names, strict=True)] == [True, False, True]
    assert digests(other)[3] == names[1][1]


def test_what_the_processor_refuses_names_the_item(extractor: FeatureExtractor) -> None:
    with pytest.raises(MediaError, match="audio 3: the model cannot take it: it is too short"):
        extractor.extract("file", DecodedAudio(speech()[:300]), "audio 3")
    with pytest.raises(MediaError, match=r"image 2: the model cannot take it: .*aspect ratio"):
        extractor.extract("file", DecodedImage(np.zeros((8, 4000, 3), np.uint8)), "image 2")
    with pytest.raises(MediaError, match="video 1's sound: "):
        extractor.extract("file", DecodedVideo(np.array(motion(2.0, 2, 64, 64)), speech()[:300]), "video 1")


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


def windows_of(n_window: int) -> Windows:
    return Windows.of(SimpleNamespace(n_window=n_window))


@settings(max_examples=50, deadline=None)
@given(n_window=st.sampled_from(sorted(ENCODERS)), frames=st.integers(3, 700), seed=st.integers(0, 99))
def test_the_encoder_gives_the_same_for_windows_alone_as_for_the_whole(
    n_window: int, frames: int, seed: int
) -> None:
    encoder, mel = ENCODERS[n_window], noise(frames, seed)
    whole = encode(encoder, mel)
    windows = list(windows_of(n_window).cut(item_of(mel)))
    pieces = [window.data["input_audio_features"].data for window in windows]
    assert [Windows.tokens(piece.shape[1]) for piece in pieces] == [window.tokens for window in windows]
    assert sum(window.tokens for window in windows) == whole.shape[0] == Windows.tokens(frames)
    alone = torch.cat([encode(encoder, piece) for piece in pieces])
    assert float((alone - whole).abs().max()) < TOLERANCE
    # In one step they are one call, as the whole is: equal to the last bit, without a remainder that is cut.
    if sum(piece.shape[1] for piece in pieces) == frames:
        assert torch.equal(encode(encoder, *pieces), whole)


@given(frames=st.integers(1, 900), changed=st.integers(0, 899), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_windows_are_named_by_their_features(frames: int, changed: int, seed: int) -> None:
    mel = noise(frames, seed)
    names = [window.digest for window in Windows(200).cut(item_of(mel))]
    assert names == [window.digest for window in Windows(200).cut(item_of(mel.clone()))]
    # What follows changes no window that is complete.
    longer = torch.cat([mel, noise(333, seed + 1)], dim=1)
    complete = frames // 200
    assert [window.digest for window in Windows(200).cut(item_of(longer))][:complete] == names[:complete]
    if changed < frames and changed // 200 < len(names):
        mel[3, changed] += 0.001
        others = [window.digest for window in Windows(200).cut(item_of(mel))]
        assert [at for at, name in enumerate(names) if others[at] != name] == [changed // 200]


def test_a_part_of_a_window_has_another_name_than_the_whole_window() -> None:
    silent = torch.full((16, 450), -1.5)
    first, second, third = Windows(200).cut(item_of(silent))
    assert first.digest == second.digest != third.digest


@pytest.mark.parametrize(("n_window", "frames"), [(100, 200), (50, 100), (25, 100), (1, 4), (6, 12)])
def test_a_window_has_whole_tokens(n_window: int, frames: int) -> None:
    assert windows_of(n_window).frames == frames
    assert 4 * Windows.tokens(frames) == frames


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

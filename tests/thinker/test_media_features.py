"""Features are bit for bit those of transformers' own processor."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen2_5OmniProcessor

from omnirelay.errors import MediaError
from services.families.qwen_media.features import FeatureExtractor, Features, settled
from services.families.qwen_media.spans import Marks
from services.thinker.media.decoded import DecodedAudio, DecodedImage, DecodedVideo
from tests.support.media import drawing, motion, speech
from tests.support.thinking import ThinkerRig


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint: Path) -> Qwen2_5OmniProcessor:
    return Qwen2_5OmniProcessor.from_pretrained(tiny_checkpoint)


@pytest.fixture
def extractor(thinker: ThinkerRig) -> FeatureExtractor:
    return FeatureExtractor(thinker.engine, Marks.of(thinker.engine.model_config.hf_config.thinker_config))


@pytest.fixture
def causal(thinker: ThinkerRig) -> FeatureExtractor:
    marks = Marks.of(thinker.engine.model_config.hf_config.thinker_config)
    return FeatureExtractor(thinker.engine, marks, "causal")


@pytest.mark.parametrize("length", [480, 481, 639, 1234, 15_999, 16_000, 16_001, 32_000, 40_017])
def test_sound(extractor: FeatureExtractor, theirs: Qwen2_5OmniProcessor, length: int) -> None:
    samples = speech()[5_000 : 5_000 + length]
    windows = extractor.extract("file", DecodedAudio(samples), "audio 1")
    expected = theirs(text="<|AUDIO|>", audio=[samples], return_tensors="pt")
    frames = int(expected["feature_attention_mask"].sum())
    mel = torch.cat([window.data["input_audio_features"].data for window in windows], dim=1)
    assert torch.equal(mel, expected["input_features"][0, :, :frames])
    lengths = [int(window.data["audio_feature_lengths"].data) for window in windows]
    assert lengths[:-1] == [200] * (len(windows) - 1)
    assert sum(lengths) == frames
    assert sum(window.tokens for window in windows) == expected["input_ids"].shape[1]
    assert sum(window.nbytes for window in windows) >= frames * 128 * 4


def mel_of(windows: tuple[Features, ...]) -> torch.Tensor:
    return torch.cat([window.data["input_audio_features"].data for window in windows], dim=1)


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
        assert [each.digest for each in ours] == [each.digest for each in theirs]


def test_with_the_causal_clamp_a_louder_moment_changes_nothing_before_its_window(
    extractor: FeatureExtractor, causal: FeatureExtractor
) -> None:
    samples = louder_at(85_000)
    for each, changes in ((extractor, True), (causal, False)):
        # Both have the silence behind the end that the look-ahead needs.
        begun = each.extract("file", DecodedAudio(samples[:70_000]), "audio 1")
        whole = each.extract("file", DecodedAudio(samples), "audio 1")
        settled_before = [window.digest for window in settled(begun, each.window_frames)]
        assert len(settled_before) == 2
        assert ([window.digest for window in whole][:2] != settled_before) == changes


@pytest.mark.parametrize(("width", "height"), [(320, 240), (30, 30), (2000, 40), (8, 8), (33, 1000)])
def test_pictures(extractor: FeatureExtractor, theirs: Qwen2_5OmniProcessor, width: int, height: int) -> None:
    image = drawing(4, width, height)
    (features,) = extractor.extract("file", DecodedImage(np.array(image)), "image 1")
    expected = theirs(text="<|IMAGE|>", images=[image], return_tensors="pt")
    assert torch.equal(features.data["pixel_values"].data, expected["pixel_values"])
    assert features.data["image_grid_thw"].data.tolist() == expected["image_grid_thw"][0].tolist()
    assert features.tokens == expected["input_ids"].shape[1]
    assert features.grid is not None
    assert features.grid.tokens == features.tokens


@pytest.mark.parametrize("heard", [True, False])
def test_videos(extractor: FeatureExtractor, theirs: Qwen2_5OmniProcessor, heard: bool) -> None:
    frames = np.array(motion(3.5, 2, 200, 112))
    samples = speech()[:50_000]
    all_features = extractor.extract("file", DecodedVideo(frames, samples if heard else None), "video 1")
    expected = theirs(
        text="<|vision_bos|><|VIDEO|><|vision_eos|>",
        videos=[frames],
        audio=[samples] if heard else None,
        use_audio_in_video=heard,
        return_tensors="pt",
    )
    pictures = all_features[0]
    assert [each.kind for each in all_features] == (["video", "audio"] if heard else ["video"])
    assert [each.digest for each in all_features] == (["file.video", "file.audio"] if heard else ["file"])
    assert torch.equal(pictures.data["pixel_values_videos"].data, expected["pixel_values_videos"])
    assert float(pictures.data["second_per_grid_ts"].data) == float(expected["video_second_per_grid"][0])
    around = 4 if heard else 2
    assert sum(each.tokens for each in all_features) == expected["input_ids"].shape[1] - around


def test_what_the_processor_refuses_names_the_item(extractor: FeatureExtractor) -> None:
    with pytest.raises(MediaError, match="audio 3: the model cannot take it: it is too short"):
        extractor.extract("file", DecodedAudio(speech()[:300]), "audio 3")
    with pytest.raises(MediaError, match=r"image 2: the model cannot take it: .*aspect ratio"):
        extractor.extract("file", DecodedImage(np.zeros((8, 4000, 3), np.uint8)), "image 2")
    with pytest.raises(MediaError, match="video 1's sound: "):
        extractor.extract("file", DecodedVideo(np.array(motion(2.0, 2, 64, 64)), speech()[:300]), "video 1")

"""Features are bit for bit those of transformers' own processor."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniProcessor

from omnirelay.errors import MediaError
from services.families.qwen2_5_omni.thinker.features import FeatureExtractor
from services.families.qwen2_5_omni.thinker.marks import Marks
from services.thinker.media.decoded import DecodedAudio, DecodedImage, DecodedVideo
from tests.support.media import drawing, motion, speech
from tests.support.thinking import ThinkerRig


@pytest.fixture(scope="module")
def theirs(tiny_checkpoint: Path) -> Qwen2_5OmniProcessor:
    return Qwen2_5OmniProcessor.from_pretrained(tiny_checkpoint)


@pytest.fixture
def extractor(thinker: ThinkerRig) -> FeatureExtractor:
    return FeatureExtractor(thinker.engine, Marks.of(thinker.engine.model_config.hf_config.thinker_config))


@pytest.mark.parametrize("length", [480, 481, 639, 1234, 15_999, 16_000, 16_001, 40_017])
def test_sound(extractor: FeatureExtractor, theirs: Qwen2_5OmniProcessor, length: int) -> None:
    samples = speech()[5_000 : 5_000 + length]
    (features,) = extractor.extract(DecodedAudio(samples), "audio 1")
    expected = theirs(text="<|AUDIO|>", audio=[samples], return_tensors="pt")
    frames = int(expected["feature_attention_mask"].sum())
    assert torch.equal(features.data["input_audio_features"].data, expected["input_features"][0, :, :frames])
    assert int(features.data["audio_feature_lengths"].data) == frames
    assert features.tokens == expected["input_ids"].shape[1]
    assert features.nbytes >= frames * 128 * 4


@pytest.mark.parametrize(("width", "height"), [(320, 240), (30, 30), (2000, 40), (8, 8), (33, 1000)])
def test_pictures(extractor: FeatureExtractor, theirs: Qwen2_5OmniProcessor, width: int, height: int) -> None:
    image = drawing(4, width, height)
    (features,) = extractor.extract(DecodedImage(np.array(image)), "image 1")
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
    all_features = extractor.extract(DecodedVideo(frames, samples if heard else None), "video 1")
    expected = theirs(
        text="<|vision_bos|><|VIDEO|><|vision_eos|>",
        videos=[frames],
        audio=[samples] if heard else None,
        use_audio_in_video=heard,
        return_tensors="pt",
    )
    pictures = all_features[0]
    assert [each.kind for each in all_features] == (["video", "audio"] if heard else ["video"])
    assert torch.equal(pictures.data["pixel_values_videos"].data, expected["pixel_values_videos"])
    assert float(pictures.data["second_per_grid_ts"].data) == float(expected["video_second_per_grid"][0])
    around = 4 if heard else 2
    assert sum(each.tokens for each in all_features) == expected["input_ids"].shape[1] - around


def test_what_the_processor_refuses_names_the_item(extractor: FeatureExtractor) -> None:
    with pytest.raises(MediaError, match="audio 3: the model cannot take it: it is too short"):
        extractor.extract(DecodedAudio(speech()[:300]), "audio 3")
    with pytest.raises(MediaError, match=r"image 2: the model cannot take it: .*aspect ratio"):
        extractor.extract(DecodedImage(np.zeros((8, 4000, 3), np.uint8)), "image 2")
    with pytest.raises(MediaError, match="video 1's sound: "):
        extractor.extract(DecodedVideo(np.array(motion(2.0, 2, 64, 64)), speech()[:300]), "video 1")

"""Position ids of a prompt, from what the engine knows of its media."""

from collections.abc import Sequence

from vllm.multimodal.inputs import MultiModalFeatureSpec

from omnirelay.errors import StageFailedError
from services.families.qwen2_5_omni.thinker.spans import Clock, Grid, VisualSpan, mrope_positions
from services.thinker.media.rules import Positions


def prompt_positions(length: int, features: Sequence[MultiModalFeatureSpec], clock: Clock) -> Positions:
    """M-RoPE position ids int64 ``[3, length]`` of a prompt, by the engine's features of all its media.

    vLLM's own differ from the reference's where the sound of a video is heard.

    Raises:
        StageFailedError: The engine no longer has the features of a picture or video.
    """
    sounds = {
        each.mm_position.offset: each.mm_position.get_num_embeds()
        for each in features
        if each.modality == "audio"
    }
    spans = [
        VisualSpan(feature.mm_position.offset, _grid(feature, clock), sounds.get(feature.mm_position.offset))
        for feature in sorted(features, key=lambda each: each.mm_position.offset)
        if feature.modality != "audio"
    ]
    return mrope_positions(length, spans, clock)


def _grid(feature: MultiModalFeatureSpec, clock: Clock) -> Grid:
    """The grid of a picture or video, from what its encoder is given."""
    if feature.data is None:
        raise StageFailedError("the engine has lost the features of an item")
    patches = feature.data[f"{feature.modality}_grid_thw"].data.tolist()
    is_video = feature.modality == "video"
    return Grid.of(patches, float(feature.data["second_per_grid_ts"].data) if is_video else 0.0, clock)

"""The files of a Qwen2.5-Omni checkpoint, as far as they can be judged without loading a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointError
from omnirelay.values import SAMPLE_RATE
from services.families.family import Paged, SynthesisBytes
from shared.messages import STAGES, StageName
from shared.model_files import check_torch_file

FRAME_SAMPLES: Final = 480
"""Samples of a codec token, 20 ms."""
CODEC_RATE: Final = SAMPLE_RATE / FRAME_SAMPLES
"""Codec tokens a second, 50; while text is written, each needs a conditioning row of its own."""
SPEAKER_FILE: Final = "spk_dict.pt"
FILES: Final = ("config.json", "preprocessor_config.json", SPEAKER_FILE)
THINKER: Final = "OmniRelaySpeakingThinker"
TALKER: Final = "OmniRelayConditionedTalker"
"""Architectures: the names by which vLLM knows the models."""
MODELS: Final = {
    THINKER: "services.families.qwen2_5_omni.thinker.model:SpeakingThinker",
    TALKER: "services.families.qwen2_5_omni.talker.model:ConditionedTalker",
}
SYNTHESIS: Final = SynthesisBytes(solver_frame=160_000, vocoder_frame=320_000, stream=28_000_000)
WEIGHTS: Final[Mapping[StageName, str]] = {stage: stage for stage in STAGES}

_TEXT_DIVIDED: Final = {
    "num_attention_heads": "attention heads",
    "intermediate_size": "feed-forward columns",
}
_AUDIO_DIVIDED: Final = {"encoder_attention_heads": "audio encoder's heads"}
_VISION_DIVIDED: Final = {"num_heads": "image encoder's heads"}
"""Sizes that ``tensor_parallel_size`` must divide, and what errors call them."""


def is_of_another(stage: StageName, name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to another stage; files of nothing else are not loaded."""
    return name.startswith(tuple(f"{prefix}." for other, prefix in WEIGHTS.items() if other != stage))


def check_files(directory: Path) -> None:
    """Check that the file of the voices is whole; raises CheckpointError if not."""
    check_torch_file(directory / SPEAKER_FILE)


def paged(config: Mapping[str, Any]) -> dict[StageName, Paged]:
    """What thinker and talker keep in their KV caches; raises CheckpointError at a missing value."""
    try:
        thinker = config["thinker_config"]["text_config"]
        talker = config["talker_config"]
        width = int(thinker["hidden_size"])
        heads = int(thinker["num_attention_heads"])
        return {
            "thinker": _paged(
                thinker,
                thinker.get("head_dim") or width // heads,
                width,
                _sizes(config["thinker_config"].get("audio_config"), _AUDIO_DIVIDED)
                | _sizes(config["thinker_config"].get("vision_config"), _VISION_DIVIDED),
            ),
            "talker": _paged(talker, talker["head_dim"], talker["embedding_size"]),
        }
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json lacks a value, or has a strange one: {error!r}") from error


def _paged(
    config: Mapping[str, Any], head_dim: int, row: int, divided: Mapping[str, int] | None = None
) -> Paged:
    key_value_heads = int(config["num_key_value_heads"])
    keys_and_values = 2 * int(config["num_hidden_layers"]) * key_value_heads * int(head_dim)
    return Paged(
        int(config["max_position_embeddings"]),
        keys_and_values + int(row),
        int(row),
        _sizes(config, _TEXT_DIVIDED) | dict(divided or {}),
        key_value_heads,
    )


def _sizes(config: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, int]:
    """The sizes that a part of ``config.json`` has; it may leave to transformers' defaults what they are."""
    return {name: int(config[key]) for key, name in names.items() if config and key in config}

"""The files of a Qwen2.5-Omni checkpoint, as far as they can be judged without loading a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from omnirelay.values import SAMPLE_RATE
from services.families.family import (
    Paged,
    SynthesisBytes,
    decoder_paged,
    encoders_divided,
    reading_config,
    sizes_of,
)
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


_DIVIDED: Final = {"num_attention_heads": "attention heads", "intermediate_size": "feed-forward columns"}


def is_of_another(stage: StageName, name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to another stage; files of nothing else are not loaded."""
    return name.startswith(tuple(f"{prefix}." for other, prefix in WEIGHTS.items() if other != stage))


def check_files(directory: Path) -> None:
    """Check that the file of the voices is whole; raises CheckpointError if not."""
    check_torch_file(directory / SPEAKER_FILE)


def paged(config: Mapping[str, Any]) -> dict[StageName, Paged]:
    """What thinker and talker keep in their KV caches; raises CheckpointError at a missing value."""
    with reading_config():
        thinker, talker = config["thinker_config"]["text_config"], config["talker_config"]
        encoders = encoders_divided(config["thinker_config"])
        return {
            "thinker": decoder_paged(
                thinker, int(thinker["hidden_size"]), sizes_of(thinker, _DIVIDED) | encoders
            ),
            "talker": decoder_paged(talker, int(talker["embedding_size"]), sizes_of(talker, _DIVIDED)),
        }

"""Qwen2.5-Omni: a thinker whose last hidden states condition a talker, and a DiT with BigVGAN.

Here is what can be said of a checkpoint without loading a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from omnirelay.values import SAMPLE_RATE
from services.families.family import (
    Family,
    Paged,
    SynthesisBytes,
    decoder_paged,
    encoders_divided,
    part,
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
WEIGHTS: Final[Mapping[StageName, str]] = {stage: stage for stage in STAGES}
_DIVIDED: Final = {"num_attention_heads": "attention heads", "intermediate_size": "feed-forward columns"}


def is_of_another(stage: StageName, name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to another stage; files of nothing else are not loaded."""
    return name.startswith(tuple(f"{prefix}." for other, prefix in WEIGHTS.items() if other != stage))


def _check_files(directory: Path) -> None:
    """Check that the file of the voices is whole; raises CheckpointError if not."""
    check_torch_file(directory / SPEAKER_FILE)


def _paged(config: Mapping[str, Any]) -> dict[StageName, Paged]:
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


QWEN2_5_OMNI: Final = Family(
    model_type="qwen2_5_omni",
    files=("config.json", "preprocessor_config.json", SPEAKER_FILE),
    check_files=_check_files,
    weights=WEIGHTS,
    models=(
        "services.families.qwen2_5_omni.thinker:SpeakingThinker",
        "services.families.qwen2_5_omni.talker:ConditionedTalker",
    ),
    paged=_paged,
    synthesis=SynthesisBytes(solver_frame=160_000, vocoder_frame=320_000, stream=28_000_000),
    thinker=part("services.families.qwen2_5_omni.thinker:THINKER"),
    talker=part("services.families.qwen2_5_omni.talker:TALKER"),
    token2wav=part("services.families.qwen2_5_omni.token2wav.model:TOKEN2WAV"),
)

"""Qwen3-Omni: a thinker whose inner layer conditions a talker of several codebooks, and a causal vocoder.

Here is what can be said of a checkpoint without loading a model.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointError
from services.families.family import (
    Family,
    Paged,
    SynthesisBytes,
    decoder_paged,
    encoders_divided,
    head_size,
    part,
    reading_config,
    sizes_of,
)
from shared.checkpoints import read_config
from shared.messages import StageName

UNIT_SAMPLES: Final = 240
"""10 ms: what a step's budget of audio counts."""
PROJECTIONS: Final = ("talker.text_projection.", "talker.hidden_projection.")
"""Tensors of the talker's part that the thinker loads: its rows are as wide as the talker's states."""

_DIVIDED: Final = {"num_attention_heads": "attention heads"}
_COLUMNS: Final = 32
"""Experts of a worker need a multiple of so many columns: with others vLLM computes wrong values on CPUs."""
_BLOCKS: Final = f"experts' blocks of {_COLUMNS} columns"
_STATES: Final = 6
_FEED_FORWARD: Final = 3
"""Estimated: how often a layer has a token's hidden state, and its feed-forward's inner one, at once."""
_LARGEST_PICTURE: Final = 16_384
"""Tokens of the largest picture, or video, that the estimate of memory supposes."""


def is_of_another(name: str) -> bool:
    """Whether a tensor is not the thinker's to load."""
    return name.startswith(("talker.", "code2wav.")) and not name.startswith(PROJECTIONS)


def speaks(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has more than a thinker."""
    return bool(config.get("enable_audio_output", True))


def _check_files(directory: Path) -> None:
    """Check what the stages read of ``config.json`` first; raises CheckpointError."""
    config = read_config(directory)
    _paged(config)
    if speaks(config):
        voices(directory)


def voices(directory: Path) -> Sequence[str]:
    """The voices that a checkpoint's ``config.json`` names; raises CheckpointError if there is none."""
    talker = read_config(directory).get("talker_config")
    names = talker.get("speaker_id") if isinstance(talker, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{directory}: config.json names no voices: talker_config.speaker_id is empty")
    return list(names)


def _paged(config: Mapping[str, Any]) -> dict[StageName, Paged]:
    """What thinker and talker keep in their KV caches; raises CheckpointError at a missing value."""
    with reading_config():
        thinker = config["thinker_config"]
        talker = config["talker_config"]["text_config"] if speaks(config) else None
        row = int((talker or thinker["text_config"])["hidden_size"])
        seen = thinker.get("vision_config") or {}
        states, inner = _STATES * seen.get("hidden_size", 0), _FEED_FORWARD * seen.get("intermediate_size", 0)
        media = _LARGEST_PICTURE * seen.get("spatial_merge_size", 2) ** 2 * (states + inner)
        encoders = encoders_divided(thinker)
        kept: dict[StageName, Paged] = {"thinker": _decoder(thinker["text_config"], row, encoders, media)}
        return kept | ({"talker": _decoder(talker, row, {})} if talker else {})


def _decoder(config: Mapping[str, Any], row: int, divided: Mapping[str, int], media: int = 0) -> Paged:
    hidden, columns = int(config["hidden_size"]), int(config.get("moe_intermediate_size", 0))
    heads = int(config["num_key_value_heads"])
    attention = 2 * (heads + int(config.get("num_attention_heads", heads))) * head_size(config)
    experts = int(config.get("num_experts_per_tok", 0)) * (hidden + _FEED_FORWARD * columns)
    divided = sizes_of(config, _DIVIDED) | dict(divided) | {_BLOCKS: columns // _COLUMNS}
    return decoder_paged(config, row, divided, _STATES * hidden + attention + experts, media)


def frame_samples(code2wav: Any) -> int:
    """Samples that a codec frame lasts."""
    return prod(code2wav.upsampling_ratios) * prod(code2wav.upsample_rates)


def samples_of(code2wav: Any, frames: int) -> int:
    """Samples of a stream of so many codec frames: each transposed convolution trims both of its ends."""
    length = frames * prod(code2wav.upsampling_ratios)
    for rate in code2wav.upsample_rates:
        length = max(0, length - 1) * rate
    return length


def trimmed_samples(code2wav: Any) -> int:
    """By how many samples any stream is shorter than its frames."""
    return frame_samples(code2wav) - samples_of(code2wav, 1)


QWEN3_OMNI: Final = Family(
    model_type="qwen3_omni_moe",
    files=("config.json", "preprocessor_config.json"),
    check_files=_check_files,
    weights={"thinker": "thinker", "talker": "talker", "token2wav": "code2wav"},
    models=(
        "services.families.qwen3_omni.thinker:FrameThinker",
        "services.families.qwen3_omni.talker:FrameTalker",
    ),
    paged=_paged,
    # Measured on a CPU, with the released sizes and random weights.
    synthesis=SynthesisBytes(solver_frame=0, vocoder_frame=1_900_000, stream=5_200_000),
    thinker=part("services.families.qwen3_omni.thinker:THINKER"),
    talker=part("services.families.qwen3_omni.talker:TALKER"),
    token2wav=part("services.families.qwen3_omni.code2wav:TOKEN2WAV"),
)

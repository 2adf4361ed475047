"""The files of a Qwen3-Omni checkpoint, as far as they can be judged without loading a model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointError
from services.families.family import (
    Paged,
    decoder_paged,
    encoders_divided,
    head_size,
    reading_config,
    sizes_of,
)
from shared.checkpoints import read_config
from shared.messages import StageName

FILES: Final = ("config.json", "preprocessor_config.json")
THINKER: Final = "OmniRelayFrameThinker"
TALKER: Final = "OmniRelayFrameTalker"
"""Architectures: the names by which vLLM knows the models."""
MODELS: Final = {
    THINKER: "services.families.qwen3_omni.thinker.model:FrameThinker",
    TALKER: "services.families.qwen3_omni.talker.model:FrameTalker",
}
WEIGHTS: Final[Mapping[StageName, str]] = {
    "thinker": "thinker",
    "talker": "talker",
    "token2wav": "code2wav",
}
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


def check_files(directory: Path) -> None:
    """Check what the stages read of ``config.json`` first; raises CheckpointError."""
    config = read_config(directory)
    paged(config)
    if speaks(config):
        voices(directory)


def voices(directory: Path) -> Sequence[str]:
    """The voices that a checkpoint's ``config.json`` names; raises CheckpointError if there is none."""
    talker = read_config(directory).get("talker_config")
    names = talker.get("speaker_id") if isinstance(talker, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{directory}: config.json names no voices: talker_config.speaker_id is empty")
    return list(names)


def paged(config: Mapping[str, Any]) -> dict[StageName, Paged]:
    """What thinker and talker keep in their KV caches; raises CheckpointError at a missing value."""
    with reading_config():
        thinker = config["thinker_config"]
        talker = config["talker_config"]["text_config"] if speaks(config) else None
        row = int((talker or thinker["text_config"])["hidden_size"])
        seen = thinker.get("vision_config") or {}
        states, inner = _STATES * seen.get("hidden_size", 0), _FEED_FORWARD * seen.get("intermediate_size", 0)
        media = _LARGEST_PICTURE * seen.get("spatial_merge_size", 2) ** 2 * (states + inner)
        encoders = encoders_divided(thinker)
        kept: dict[StageName, Paged] = {"thinker": _paged(thinker["text_config"], row, encoders, media)}
        return kept | ({"talker": _paged(talker, row, {})} if talker else {})


def _paged(config: Mapping[str, Any], row: int, divided: Mapping[str, int], media: int = 0) -> Paged:
    hidden, columns = int(config["hidden_size"]), int(config.get("moe_intermediate_size", 0))
    heads = int(config["num_key_value_heads"])
    attention = 2 * (heads + int(config.get("num_attention_heads", heads))) * head_size(config)
    experts = int(config.get("num_experts_per_tok", 0)) * (hidden + _FEED_FORWARD * columns)
    divided = sizes_of(config, _DIVIDED) | dict(divided) | {_BLOCKS: columns // _COLUMNS}
    return decoder_paged(config, row, divided, _STATES * hidden + attention + experts, media)

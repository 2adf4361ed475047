"""The files of a Qwen3-Omni checkpoint, as far as they can be judged without loading a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from omnirelay.errors import CheckpointError
from services.families.family import Paged
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

_DECODER_DIVIDED: Final = {"num_attention_heads": "attention heads"}
_COLUMNS: Final = 32
"""Experts of a worker need a multiple of so many columns: with others vLLM computes wrong values on CPUs."""
_BLOCKS: Final = f"experts' blocks of {_COLUMNS} columns"
_STATES: Final = 6
_FEED_FORWARD: Final = 3
"""Estimated: how often a layer has a token's hidden state, and its feed-forward's inner one, at once."""
_AUDIO_DIVIDED: Final = {"encoder_attention_heads": "audio encoder's heads"}
_VISION_DIVIDED: Final = {"num_heads": "image encoder's heads"}
"""Sizes that ``tensor_parallel_size`` must divide, and what errors call them."""


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
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    paged(config)
    if speaks(config) and not config["talker_config"].get("speaker_id"):
        raise CheckpointError(f"{directory}: config.json names no voices: talker_config.speaker_id is empty")


def paged(config: Mapping[str, Any]) -> dict[StageName, Paged]:
    """What thinker and talker keep in their KV caches; raises CheckpointError at a missing value."""
    try:
        thinker = config["thinker_config"]
        talker = config["talker_config"]["text_config"] if speaks(config) else None
        row = int((talker or thinker["text_config"])["hidden_size"])
        encoders = _sizes(thinker.get("audio_config"), _AUDIO_DIVIDED)
        encoders |= _sizes(thinker.get("vision_config"), _VISION_DIVIDED)
        seen = thinker.get("vision_config") or {}
        states, inner = _STATES * seen.get("hidden_size", 0), _FEED_FORWARD * seen.get("intermediate_size", 0)
        media = _LARGEST_PICTURE * seen.get("spatial_merge_size", 2) ** 2 * (states + inner)
        kept: dict[StageName, Paged] = {"thinker": _paged(thinker["text_config"], row, encoders, media)}
        return kept | ({"talker": _paged(talker, row, {})} if talker else {})
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json lacks a value, or has a strange one: {error!r}") from error


def _paged(config: Mapping[str, Any], row: int, divided: Mapping[str, int], media: int = 0) -> Paged:
    heads, hidden = int(config["num_key_value_heads"]), int(config["hidden_size"])
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    attention = 2 * (heads + int(config.get("num_attention_heads", heads))) * int(size)
    columns = int(config.get("moe_intermediate_size", 0))
    return Paged(
        positions=int(config["max_position_embeddings"]),
        elements=2 * int(config["num_hidden_layers"]) * heads * int(size) + row,
        row=row,
        divided=_sizes(config, _DECODER_DIVIDED) | dict(divided) | {_BLOCKS: columns // _COLUMNS},
        key_value_heads=heads,
        step=_STATES * hidden
        + attention
        + int(config.get("num_experts_per_tok", 0)) * (hidden + _FEED_FORWARD * columns),
        media=media,
    )


def _sizes(config: Mapping[str, Any] | None, names: Mapping[str, str]) -> dict[str, int]:
    """The sizes that a part of ``config.json`` has; it may leave to transformers' defaults what they are."""
    return {name: int(config[key]) for key, name in names.items() if config and key in config}

"""What gateways know of the model families, without their engines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, TypeVar

from omnirelay.errors import CheckpointError
from omnirelay.values import MediaKind

_BRIGHT = ("alloy", "coral", "fable", "marin", "nova", "sage", "shimmer")
_DARK = ("ash", "ballad", "cedar", "echo", "onyx", "verse")


@dataclass(frozen=True)
class Description:
    """A model family, found by the ``model_type`` of a checkpoint's ``config.json``."""

    model_type: str
    vocabulary: tuple[str, ...]  # Where config.json has the number of rows of the thinker's embedding table
    placeholders: Mapping[str, MediaKind]  # Special tokens that each stand for one media item
    default_speaker: str  # If a checkpoint lacks it, its first speaker
    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    speech_system_prompt: str | None = None  # What it speaks with, if its chat template has another one
    end_of_turn: str = "<|im_end|>"  # The special token that ends an answer
    audio_window_s: float = 1.0  # The audio encoder attends within windows of so many seconds


def openai_voices(bright: str, dark: str) -> dict[str, str]:
    """Aliases of OpenAI's voices, of which many clients have one built in."""
    return dict.fromkeys(_BRIGHT, bright) | dict.fromkeys(_DARK, dark)


SPEECH_SYSTEM_PROMPT: Final = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory "
    "and visual inputs, as well as generating text and speech."
)
"""What the released checkpoints were trained to speak with; their chat template has another one."""

QWEN2_5_OMNI: Final = Description(
    model_type="qwen2_5_omni",
    vocabulary=("thinker_config", "text_config", "vocab_size"),
    placeholders={"<|AUDIO|>": "audio", "<|IMAGE|>": "image", "<|VIDEO|>": "video"},
    default_speaker="Chelsie",
    voice_aliases=openai_voices("Chelsie", "Ethan"),
    speech_system_prompt=SPEECH_SYSTEM_PROMPT,
    audio_window_s=2.0,
)


QWEN3_OMNI: Final = Description(
    model_type="qwen3_omni_moe",
    vocabulary=("thinker_config", "text_config", "vocab_size"),
    placeholders={"<|audio_pad|>": "audio", "<|image_pad|>": "image", "<|video_pad|>": "video"},
    default_speaker="Ethan",
    voice_aliases=openai_voices("Chelsie", "Ethan"),
    audio_window_s=8.0,
)


F = TypeVar("F")
Descriptions = Mapping[str, Description]
"""Families by their ``model_type``."""
DESCRIPTIONS: Final[Descriptions] = MappingProxyType(
    {each.model_type: each for each in (QWEN2_5_OMNI, QWEN3_OMNI)}
)


def family_of(config: Mapping[str, Any], families: Mapping[str, F]) -> F:
    """Find a checkpoint's family by its ``config.json``; raises CheckpointError if none is known."""
    kind = config.get("model_type")
    family = families.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(map(repr, families))
        raise CheckpointError(f"config.json is of a model of type {kind!r}; known: {known}")
    return family

"""What gateways know of a model family."""

from collections.abc import Mapping
from dataclasses import dataclass, field

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

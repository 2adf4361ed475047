"""The tokens that stand for media in a prompt."""

from dataclasses import dataclass
from typing import Any, Self

from shared.messages import MediaKind


@dataclass(frozen=True)
class Marks:
    """Ids of the checkpoint's tokens that stand for media, and those before and behind sound."""

    placeholders: dict[MediaKind, int]
    audio_begin: int
    audio_end: int

    @classmethod
    def of(cls, thinker_config: Any) -> Self:
        """The tokens that a checkpoint's ``thinker_config`` names."""
        return cls(
            placeholders={
                "audio": thinker_config.audio_token_index,
                "image": thinker_config.image_token_index,
                "video": thinker_config.video_token_index,
            },
            audio_begin=thinker_config.audio_start_token_id,
            audio_end=thinker_config.audio_end_token_id,
        )

"""What a model family gives the thinker."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from vllm.v1.engine.llm_engine import LLMEngine

from services.thinker.media.rules import MediaRules
from services.thinker.speaking import SpeakingModel
from services.thinker.track import TrackWriter
from shared.config import MediaConfig


class SpeechWriter(Protocol):
    """Writes the tracks of a checkpoint's requests; made once."""

    further_rows: int
    """Most rows of a message besides those of the step."""

    @property
    def voices(self) -> Collection[str]:
        """The names of the checkpoint's voices."""

    def track(self, request_id: str, prompt: Sequence[int], voice: str) -> TrackWriter:
        """Begin a track in one of the voices; ``prompt`` has a token for each position.

        Raises InvalidRequestError if no reply to it can be spoken.
        """


Embed = Callable[[list[int]], torch.Tensor]
"""What :meth:`SpeakingModel.embed_text` gives for token ids, on the CPU."""


@dataclass(frozen=True)
class ThinkerFamily:
    """A family's thinker.

    ``speech`` takes the engine's Hugging Face configuration and the checkpoint's directory; it raises
    CheckpointError at damaged voices or unknown tokens.
    """

    model: type[SpeakingModel]
    end_tokens: Callable[[Any], list[int]]  # By the engine's Hugging Face configuration
    speech: Callable[[Any, Path, Embed], SpeechWriter]
    rows_per_s: float  # Rows of a reply that a second of its speech needs while the text is written
    media: Callable[[LLMEngine, MediaConfig], MediaRules]

"""What a model family gives the thinker."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from vllm.v1.engine.llm_engine import LLMEngine

from services.thinker.media.rules import MediaRules
from services.thinker.speaking import SpeakingModel
from shared.config import MediaConfig
from shared.messages import ConditioningRows


@dataclass(frozen=True)
class SpeechEmbeddings:
    """Rows of a track read once: ``[width]`` of each voice, and ``[n, width]`` behind the last of a reply."""

    voices: dict[str, torch.Tensor]
    closing: torch.Tensor


class TrackWriter(Protocol):
    """Turns the thinker's rows of one request into the rows that the talker is conditioned on."""

    request_id: str

    def rows(self, start: int, rows: torch.Tensor, positions: torch.Tensor) -> ConditioningRows:
        """The message for rows ``[m, width]`` from position ``start`` on, whose position ids are ``[3, m]``.

        Rows come in order, without gap; the message has at most one row more.
        """

    def close(self) -> ConditioningRows:
        """Make the last message."""


@dataclass(frozen=True)
class ThinkerFamily:
    """A family's thinker.

    ``read_embeddings`` takes the engine's Hugging Face configuration, the checkpoint's directory, and what
    embeds token ids as ``[n, hidden]``; ``track`` a request's id, its prompt's tokens, the row of its voice,
    and the closing rows.
    """

    architecture: str  # The name by which vLLM finds the model
    model: type[SpeakingModel]
    end_tokens: Callable[[Any], list[int]]  # By the engine's Hugging Face configuration
    read_embeddings: Callable[[Any, Path, Callable[[list[int]], torch.Tensor]], SpeechEmbeddings]
    track: Callable[[str, int, torch.Tensor, torch.Tensor], TrackWriter]
    rows_per_s: int  # Rows of a reply that a second of its speech needs while the text is written
    media: Callable[[LLMEngine, MediaConfig], MediaRules]

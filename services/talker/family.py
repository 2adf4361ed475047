"""What a model family gives the talker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from omnirelay.status import CodecLimits
from shared.vllm.conditioning import ConditioningStore


@dataclass(frozen=True)
class SpeechRules:
    """How a checkpoint speaks."""

    row_width: int  # Elements of a conditioning row
    prompt: Callable[[int, str], list[int]]  # By the number of rows before the start positions, and the voice
    end_tokens: list[int]  # Ids that end the speech; no id of a code is among them
    ids: int  # Every codec id that token2wav can synthesize is smaller
    codes_per_message: int  # Frames that token2wav can begin with; fewer are sent at the end alone
    codec: CodecLimits  # Of a frame's ids, vLLM samples the first, and the model gives the others


class TalkerModel(Protocol):
    """What a talker is besides a vLLM model.

    ``conditioning`` takes the worker's rows, with ``groups - 1`` columns for the further ids of the frames.
    """

    conditioning: ConditioningStore

    def further_codes(self, hidden: torch.Tensor, codes: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Complete frames that have more than one id: the others, int64 ``[n, groups - 1]``.

        ``codes`` int64 ``[n]`` were sampled from ``hidden`` ``[n, hidden]``; end tokens may be among them.
        ``draws`` float32 ``[n, groups - 1]`` of [0, 1) say which ids are taken: 0 takes the likeliest.
        """


@dataclass(frozen=True)
class TalkerFamily:
    """A family's talker.

    ``config`` narrows a whole model's Hugging Face configuration to the talker's, which has to be a vLLM
    model's.  vLLM calls it on its own result again, and on an empty one, and gets both back.
    """

    model: type[nn.Module]  # A :class:`TalkerModel`
    config: Callable[[Any], Any]
    speech: Callable[[Any], SpeechRules]  # By the narrowed configuration

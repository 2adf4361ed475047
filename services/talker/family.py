"""What a model family gives the talker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from omnirelay.status import CodecDefaults
from shared.vllm.conditioning import ConditioningStore


@dataclass(frozen=True)
class CodecSpec:
    """The codec tokens of a checkpoint.

    Attributes:
        rate: Frames a second.
        groups: Ids of a frame, one of each code book.  vLLM samples the first; the model gives the others,
            see :class:`TalkerModel`.
        ids: Every id that token2wav can synthesize is smaller.
        codes_per_message: Frames that token2wav can begin with; fewer are not sent, but at the end.
    """

    rate: int
    groups: int
    ids: int
    codes_per_message: int


@dataclass(frozen=True)
class SpeechRules:
    """How a checkpoint speaks.

    Attributes:
        row_width: Elements of a conditioning row.
        start_positions: Positions of the talker's prompt behind those of the thinker's prompt.
        prompt: Makes the talker's prompt, of as many tokens, from the length of the thinker's prompt.
        end_tokens: Ids that end the speech; no id of a code is among them.
        codec: Its codec tokens.
        defaults: How codec tokens are sampled, unless the client says so.
    """

    row_width: int
    start_positions: int
    prompt: Callable[[int], list[int]]
    end_tokens: list[int]
    codec: CodecSpec
    defaults: CodecDefaults


class TalkerModel(Protocol):
    """What a talker is besides a vLLM model.

    Attributes:
        conditioning: Where the worker puts the rows, with ``groups - 1`` columns more for the further ids of
            the frame at each position.
    """

    conditioning: ConditioningStore

    def further_codes(self, hidden: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Complete frames; needed only where a frame has more than one id.

        Args:
            hidden: Last hidden states ``[n, hidden]``.
            codes: The ids int64 ``[n]`` that were sampled from them; end tokens may be among them.

        Returns:
            The other ids int64 ``[n, groups - 1]``.
        """


@dataclass(frozen=True)
class TalkerFamily:
    """A family's talker.

    Attributes:
        architecture: The name by which vLLM finds the model.
        model: Its class, a :class:`TalkerModel`.
        config: Narrows a whole model's Hugging Face configuration to the talker's, which has to be a vLLM
            model's.  vLLM calls it on its own result again, and on an empty configuration, both of which it
            returns as they are.
        speech: The rules, by the narrowed configuration.
    """

    architecture: str
    model: type[nn.Module]
    config: Callable[[Any], Any]
    speech: Callable[[Any], SpeechRules]

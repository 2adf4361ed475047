"""The code predictor of Qwen3-Omni's talker: it completes codec frames, one codebook after the other.

Reference: transformers' ``Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration``.
"""

from typing import Final

import torch
from torch import nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
)

TOP_K: Final = 50
TOP_P: Final = 0.8
"""What the reference samples with, at temperature 1, whatever the talker does, unless that is greedy."""


def pick(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Ids int64 ``[frames]``, by logits ``[frames, ids]`` and numbers ``[frames]`` of [0, 1).

    The likeliest ids divide [0, 1) by their probabilities, in their order: 0 takes the first.
    """
    likeliest = logits.float().topk(min(TOP_K, logits.shape[-1]), dim=-1)
    probabilities = likeliest.values.softmax(-1)
    reached = probabilities.cumsum(-1)
    kept = probabilities.masked_fill(reached - probabilities >= TOP_P, 0)
    borders = kept.cumsum(-1)
    passed = (borders <= draws.unsqueeze(1) * borders[:, -1:]).sum(-1, keepdim=True)
    # Rounding may pass the last border.
    place = passed.minimum(kept.count_nonzero(-1).unsqueeze(1) - 1)
    return likeliest.indices.gather(1, place).squeeze(1)


class FrameKeyValues:
    """Room for the keys and values of one frame's positions, which are few and known beforehand.

    It takes the place of transformers' ``Cache``, of which the layers call ``update`` only.
    """

    def __init__(self, room: torch.Tensor) -> None:
        self._room = room
        self.length = 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``[frames, heads, new, size]`` each; gives those of all positions so far."""
        stop = self.length + key.shape[2]
        keys, values = self._room[layer, :, :, :, :stop]
        keys[:, :, self.length :] = key
        values[:, :, self.length :] = value
        return keys, values


class CodePredictor(nn.Module):
    """A small decoder whose positions are a frame's codebooks; its parameters are the reference's."""

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        super().__init__()
        self.config = config
        self.predictor = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration._from_config(config)

    @property
    def further(self) -> int:
        """Ids of a frame beside the first."""
        return int(self.config.num_code_groups) - 1

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum ``[frames, hidden]`` of the embeddings of ids int64 ``[frames, further]``."""
        embeddings = self.predictor.model.codec_embedding
        parts = [embed(codes[:, at]) for at, embed in enumerate(embeddings)]
        return torch.stack(parts).sum(0)

    def forward(self, hidden: torch.Tensor, first: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Complete frames: ids int64 ``[frames, further]``.

        Args:
            hidden: The talker's last hidden states ``[frames, hidden]``.
            first: The embeddings ``[frames, hidden]`` of the ids that were drawn from them.
            draws: Numbers float32 ``[frames, further]`` of [0, 1) by which the ids are picked.
        """
        model, heads = self.predictor.model, self.predictor.lm_head
        known = FrameKeyValues(self._room(hidden))
        inputs = torch.stack([hidden, first], dim=1)
        codes: list[torch.Tensor] = []
        for at, head in enumerate(heads):
            if at:
                inputs = model.codec_embedding[at - 1](codes[-1]).unsqueeze(1)
            codes.append(pick(head(self._last(inputs, known)), draws[:, at]))
        return torch.stack(codes, dim=1)

    def _last(self, inputs: torch.Tensor, known: FrameKeyValues) -> torch.Tensor:
        """The hidden state ``[frames, hidden]`` of the last of these positions."""
        start, count = known.length, inputs.shape[1]
        positions = torch.arange(start, start + count, device=inputs.device)
        seen = torch.arange(start + count, device=inputs.device) <= positions.unsqueeze(1)
        output = self.predictor.model(
            inputs_embeds=inputs,
            position_ids=positions.expand(inputs.shape[0], -1),
            attention_mask={"full_attention": seen.expand(inputs.shape[0], 1, -1, -1)},
            past_key_values=known,
        ).last_hidden_state
        known.length += count
        last: torch.Tensor = output[:, -1]
        return last

    def _room(self, hidden: torch.Tensor) -> torch.Tensor:
        config = self.config
        heads, size = config.num_key_value_heads, config.head_dim
        return hidden.new_empty(
            config.num_hidden_layers, 2, hidden.shape[0], heads, config.num_code_groups, size
        )

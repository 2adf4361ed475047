"""The code predictor of Qwen3-Omni's talker: it completes codec frames, one codebook after the other.

It runs once for each codebook of a frame, so it is most of the talker's work.  Its positions are known
beforehand: their angles and their room are buffers, nothing waits for the device, and each step of a batch
has the same shapes.

Reference: transformers' ``Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration``.
"""

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeRotaryEmbedding
from vllm._custom_ops import fused_add_rms_norm, rms_norm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.model_executor.utils import set_weight_attrs

TOP_K: Final = 50
TOP_P: Final = 0.8
"""What the reference samples with, at temperature 1, whatever the talker does, unless that is greedy."""
_LARGEST: Final = 1 - 2.0**-23
"""A product with it is smaller, however it is rounded."""


def pick(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Ids int64 ``[frames]``, by logits ``[frames, ids]`` and numbers ``[frames]`` of [0, 1).

    The likeliest ids divide [0, 1) by their probabilities, in their order: 0 takes the first.
    """
    likeliest = logits.float().topk(min(TOP_K, logits.shape[-1]), dim=-1)
    probabilities = likeliest.values.softmax(-1)
    reached = probabilities.cumsum(-1)
    kept = (reached - probabilities < TOP_P).sum(-1, keepdim=True)
    drawn = draws.clamp_max(_LARGEST).unsqueeze(1) * reached.gather(1, kept - 1)
    return likeliest.indices.gather(1, (reached <= drawn).sum(-1, keepdim=True)).squeeze(1)


class PredictorLayer(nn.Module):
    """A layer of the decoder, whole on each worker; what is added up and normed is float32."""

    unit: torch.Tensor

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig) -> None:
        super().__init__()
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        heads, bias = config.num_attention_heads, config.attention_bias
        self.heads, self.size, self.epsilon = heads, size, config.rms_norm_eps
        self.rotated = heads + config.num_key_value_heads
        whole: dict[str, Any] = {"return_bias": False, "disable_tp": True}
        self.qkv_proj = QKVParallelLinear(hidden, size, heads, config.num_key_value_heads, bias, **whole)
        self.o_proj = ReplicatedLinear(heads * size, hidden, bias, return_bias=False)
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], False, **whole)
        self.down_proj = ReplicatedLinear(inner, hidden, False, return_bias=False)
        self.input_norm, self.attended_norm = _ones(hidden), _ones(hidden)
        self.head_norm = _ones(self.rotated, size)
        self.register_buffer("unit", torch.ones(size, dtype=torch.float32), persistent=False)
        _in_parts(self.head_norm, {"q": slice(None, heads), "k": slice(heads, None)})

    def forward(
        self, hidden: torch.Tensor, added: torch.Tensor, angles: torch.Tensor, known: torch.Tensor, at: int
    ) -> torch.Tensor:
        """What is to be added ``[frames, new, hidden]``; ``hidden`` gets what was to be before, in place."""
        dtype = known.dtype
        fused_add_rms_norm(added, hidden, self.input_norm, self.epsilon)
        added = self._attend(added.to(dtype), angles, known, at).float()
        fused_add_rms_norm(added, hidden, self.attended_norm, self.epsilon)
        gate, up = self.gate_up_proj(added.to(dtype)).chunk(2, dim=-1)
        output: torch.Tensor = self.down_proj(silu(gate) * up)
        return output.float()

    def _attend(
        self, hidden: torch.Tensor, angles: torch.Tensor, known: torch.Tensor, at: int
    ) -> torch.Tensor:
        """Attention from position ``at`` on; ``known`` ``[2, frames, heads, groups, size]`` gets them."""
        stop = at + hidden.shape[1]
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.size))
        turned = heads[:, :, : self.rotated].float().contiguous()
        normed = torch.empty_like(turned)
        rms_norm(normed, turned, self.unit, self.epsilon)
        turned = normed * self.head_norm
        swapped = turned.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
        cosines, sines = angles[:, at:stop]
        turned = torch.addcmul(turned * cosines, swapped, sines).to(known.dtype)
        known[0, :, :, at:stop] = turned[:, :, self.heads :].transpose(1, 2)
        known[1, :, :, at:stop] = heads[:, :, self.rotated :].transpose(1, 2)
        keys, values = known[:, :, :, :stop]
        queries = turned[:, :, : self.heads].transpose(1, 2)
        found = scaled_dot_product_attention(queries, keys, values, is_causal=at == 0, enable_gqa=True)
        output: torch.Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return output


class CodePredictor(nn.Module):
    """A small decoder whose positions are a frame's codebooks, for as many as ``most`` frames at once."""

    angles: torch.Tensor
    known: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, config: Qwen3OmniMoeTalkerCodePredictorConfig, most: int) -> None:
        super().__init__()
        groups, size = config.num_code_groups, config.head_dim
        self.further: Final = groups - 1
        """Ids of a frame beside the first."""
        self.layers = nn.ModuleList(PredictorLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = _ones(config.hidden_size)
        self.lm_head = nn.ModuleList(
            ReplicatedLinear(config.hidden_size, config.vocab_size, False, return_bias=False)
            for _ in range(self.further)
        )
        table = torch.empty(self.further, config.vocab_size, config.hidden_size)
        self.codec_embedding = nn.Parameter(table, requires_grad=False)
        _in_parts(self.codec_embedding, range(self.further))
        cosines, sines = Qwen3OmniMoeRotaryEmbedding(config)(torch.ones(1), torch.arange(groups).unsqueeze(0))
        sines[..., : size // 2] *= -1
        room = torch.zeros(len(self.layers), 2, most, config.num_key_value_heads, groups, size)
        for name, buffer in {
            "angles": torch.cat([cosines, sines]).unsqueeze(2),
            "known": room,
            "offsets": torch.arange(self.further) * config.vocab_size,
        }.items():
            self.register_buffer(name, buffer, persistent=False)

    def embed(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum ``[frames, hidden]`` of the embeddings of ids int64 ``[frames, further]``."""
        table = self.codec_embedding.flatten(0, 1)
        return nn.functional.embedding_bag(codes + self.offsets, table, mode="sum")

    def forward(self, hidden: torch.Tensor, first: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Complete frames: ids int64 ``[frames, further]``.

        Args:
            hidden: The talker's last hidden states ``[frames, hidden]``.
            first: The embeddings ``[frames, hidden]`` of the ids that were drawn from them.
            draws: Numbers float32 ``[frames, further]`` of [0, 1) by which the ids are picked.
        """
        known = self.known[:, :, : hidden.shape[0]]
        inputs, at = torch.stack([hidden, first], dim=1), 0
        codes: list[torch.Tensor] = []
        for group, head in enumerate(self.lm_head):
            if group:
                inputs, at = self.codec_embedding[group - 1][codes[-1]].unsqueeze(1), group + 1
            codes.append(pick(head(self._last(inputs, known, at)), draws[:, group]))
        return torch.stack(codes, dim=1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the reference's tensors."""
        tables = {f"model.codec_embedding.{at}.weight": ("codec_embedding", at) for at in range(self.further)}
        return AutoWeightsLoader(self).load_weights(
            weights, mapper=_MAPPER | WeightsMapper(orig_to_new_stacked=tables)
        )

    def _last(self, inputs: torch.Tensor, known: torch.Tensor, at: int) -> torch.Tensor:
        """The hidden state ``[frames, hidden]`` of the last of these positions."""
        added = inputs.float()
        hidden = torch.zeros_like(added)
        for layer, its in zip(self.layers, known, strict=True):
            added = layer(hidden, added, self.angles, its, at)
        fused_add_rms_norm(added, hidden, self.norm, self.layers[0].epsilon)
        return added[:, -1].to(known.dtype)


_MAPPER: Final = WeightsMapper(
    orig_to_new_substr={
        "self_attn.": "",
        "mlp.": "",
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "attended_norm",
    },
    orig_to_new_stacked={
        ".q_proj": (".qkv_proj", "q"),
        ".k_proj": (".qkv_proj", "k"),
        ".v_proj": (".qkv_proj", "v"),
        ".gate_proj": (".gate_up_proj", 0),
        ".up_proj": (".gate_up_proj", 1),
        ".q_norm": (".head_norm", "q"),
        ".k_norm": (".head_norm", "k"),
    },
    orig_to_new_prefix={"model.": ""},
    orig_to_new_suffix={"norm.weight": "norm"},
)


def _in_parts(whole: nn.Parameter, places: Any) -> None:
    """Let a parameter be loaded part by part, each to its place."""

    def load(_: nn.Parameter, part: Any) -> None:
        whole.data[places[part.shard_id]] = part

    set_weight_attrs(whole, {"weight_loader": load})


def _ones(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape, dtype=torch.float32), requires_grad=False)

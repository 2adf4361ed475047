"""The talker: a Qwen2 decoder over codec tokens, conditioned by a row of the thinker at every position."""

import copy
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.sequence import IntermediateTensors

from shared.engine.conditioning import ConditioningStore

MROPE_SECTION = "talker_mrope_section"
"""Where the engine's configuration keeps the M-RoPE sections; none where positions have one axis.

They are taken out of ``rope_parameters`` before vLLM sees them: it would compute M-RoPE positions
from media of its own, but the talker's positions are the thinker's and come with the rows.
"""

SILENT_TOKENS = "talker_silent_tokens"
"""Where it keeps the ids of the prompt's tokens that have no codec embedding."""


class TalkerDecoderLayer(Qwen2DecoderLayer):
    """A Qwen2 layer whose head size is the configuration's, not hidden / heads.

    Reference: transformers' ``Qwen2_5OmniDecoderLayer``: biases on q, k and v, none on the output.
    """

    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        nn.Module.__init__(self)
        self.hidden_size = config.hidden_size
        self.self_attn = LlamaAttention(
            config=config,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            quant_config=quant_config,
            bias=True,
            bias_o_proj=False,
            cache_config=cache_config,
            prefix=f"{prefix}.self_attn",
        )
        self.mlp = Qwen2MLP(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            quant_config=quant_config,
            prefix=f"{prefix}.mlp",
        )
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class ConditionedTalker(nn.Module):
    """Codec tokens in, codec logits out; the input is ``proj(codec_embed(id) + row)``.

    The row of each position is read from paged KV memory, where the worker has put it.

    Reference: transformers' ``Qwen2_5OmniTalkerForConditionalGeneration``.
    """

    hf_to_vllm_mapper: ClassVar[WeightsMapper] = WeightsMapper(
        orig_to_new_prefix={
            "thinker.": None,
            "token2wav.": None,
            "talker.codec_head.": "codec_head.",
            "talker.model.": "model.",
            "talker.thinker_to_talker_proj.": "proj.",
        }
    )
    silent_tokens: torch.Tensor
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # noqa: ARG002
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        decoder_config = copy.deepcopy(self.config)
        sections = getattr(decoder_config, MROPE_SECTION)
        self._axes = 3 if sections else 1
        if sections:
            rope = {**decoder_config.rope_parameters, "mrope_section": sections}
            decoder_config.rope_parameters = rope
        self.model = Qwen2Model(
            vllm_config=vllm_config.with_hf_config(decoder_config, architectures=["Qwen2ForCausalLM"]),
            prefix="model",
            decoder_layer_type=TalkerDecoderLayer,
        )
        self.model.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, self.config.embedding_size)
        self.proj = ReplicatedLinear(self.config.embedding_size, self.config.hidden_size, return_bias=False)
        self.codec_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        self.conditioning = ConditioningStore(
            self.config.embedding_size, self.config.num_hidden_layers, vllm_config.cache_config
        )
        self.register_buffer(
            "silent_tokens", torch.tensor(getattr(self.config, SILENT_TOKENS)), persistent=False
        )
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Codec embeddings ``[n, embedding_size]``; zero for tokens that only stand for the prompt."""
        # A comparison with each: torch.isin sorts.
        silent = (input_ids.unsqueeze(-1) == self.silent_tokens).any(-1, keepdim=True)
        return self.model.embed_tokens(input_ids).masked_fill(silent, 0)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,  # noqa: ARG002 - part of vLLM's interface
        **_: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Last hidden states ``[n, hidden]`` of codec tokens ``[n]``.

        vLLM's own ``positions`` only serve while it measures memory: the rows bring theirs.
        """
        embeds = self.embed_input_ids(input_ids)
        conditioning = self.conditioning.read_batch(input_ids.shape[0])
        if conditioning is None:
            position_ids = positions.expand(self._axes, -1)
        else:
            rows, position_ids = conditioning
            embeds = embeds + rows
        # With one axis vLLM rotates by its plain kernel; M-RoPE takes as long as the attention.
        position_ids = position_ids if self._axes > 1 else position_ids[0]
        return self.model(None, position_ids, intermediate_tensors, self.proj(embeds))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Codec logits ``[n, vocabulary]``; the start token is never drawn, as in the reference."""
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            logits[:, self.config.tts_codec_start_token_id] = float("-inf")
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker's part of the checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)

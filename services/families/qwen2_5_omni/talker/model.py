"""The talker: a Qwen2 decoder over codec tokens, conditioned by a row of the thinker at every position."""

import copy
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import CacheConfig, VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer, Qwen2MLP, Qwen2Model
from vllm.model_executor.models.utils import WeightsMapper
from vllm.sequence import IntermediateTensors

from services.families.codec_decoder import CodecDecoder, in_sections
from services.families.qwen2_5_omni.files import is_of_another

MROPE_SECTION = "talker_mrope_section"
"""Where the engine's configuration keeps the M-RoPE sections.

They are taken out of ``rope_parameters`` before vLLM sees them: it would compute M-RoPE positions
from media of its own, but the talker's positions are the thinker's and come with the rows.
"""

CODES = "codes"
"""Where it keeps how many codec ids token2wav can make sound of; these are the smallest ones."""


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
            # Of its rotary embedding's table; the model puts its own in its place.
            max_position_embeddings=1,
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


class ConditionedTalker(CodecDecoder):
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

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # noqa: ARG002
        config = vllm_config.model_config.hf_config
        model = Qwen2Model(
            vllm_config=vllm_config.with_hf_config(copy.deepcopy(config), architectures=["Qwen2ForCausalLM"]),
            prefix="model",
            decoder_layer_type=TalkerDecoderLayer,
        )
        super().__init__(
            vllm_config,
            model,
            in_sections(getattr(config, MROPE_SECTION)),
            _undrawable(config),
            config.tts_codec_mask_token_id,
            config.embedding_size,
        )
        self.model.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.embedding_size)
        self.proj = ReplicatedLinear(config.embedding_size, config.hidden_size, return_bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,  # noqa: ARG002 - part of vLLM's interface
        **_: object,
    ) -> torch.Tensor | IntermediateTensors:
        """Last hidden states ``[n, hidden]`` of codec tokens ``[n]``."""
        embeds = self.embed_input_ids(input_ids)
        conditioning = self.conditioning.read_batch(input_ids.shape[0])
        if conditioning is None:
            # Only while vLLM measures memory: the rows bring their own positions.
            position_ids = positions.expand(3, -1)
        else:
            rows, position_ids = conditioning
            embeds = embeds + rows
        return self.decode(self.proj(embeds), position_ids, intermediate_tensors)

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Whether vLLM's loader may leave out a file that has nothing but such tensors."""
        return is_of_another("talker", name)


def end_tokens(config: Any) -> list[int]:
    """Ids that end the speech, as in the reference (``talker_eos_token_id`` of its ``generate``)."""
    return [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]


def _undrawable(config: Any) -> torch.Tensor:
    """Bool ``[vocabulary]``: ids that are neither codes that token2wav knows nor end tokens.

    The reference suppresses the start token alone: of the other ids its token2wav fails.
    """
    undrawable = torch.arange(config.vocab_size) >= getattr(config, CODES)
    undrawable[end_tokens(config)] = False
    undrawable[config.tts_codec_start_token_id] = True
    return undrawable

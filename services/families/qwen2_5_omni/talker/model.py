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

from services.families.qwen2_5_omni.files import is_of_another
from services.families.rotary import StepRotary, in_sections
from shared.vllm.conditioning import ConditioningStore

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
    inputs: torch.Tensor
    undrawable: torch.Tensor
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # noqa: ARG002
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.model = Qwen2Model(
            vllm_config=vllm_config.with_hf_config(
                copy.deepcopy(self.config), architectures=["Qwen2ForCausalLM"]
            ),
            prefix="model",
            decoder_layer_type=TalkerDecoderLayer,
        )
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.rotary = StepRotary(
            self.config.head_dim,
            self.config.rope_parameters["rope_theta"],
            in_sections(getattr(self.config, MROPE_SECTION)),
            most_tokens,
        )
        for layer in self.model.layers:
            layer.self_attn.rotary_emb = self.rotary
        self.model.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, self.config.embedding_size)
        self.proj = ReplicatedLinear(self.config.embedding_size, self.config.hidden_size, return_bias=False)
        self.codec_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        self.conditioning = ConditioningStore(
            self.config.embedding_size, self.config.num_hidden_layers, vllm_config.cache_config
        )
        # What goes into the decoder is at the same place in each step: captured CUDA graphs read it there.
        self.register_buffer("inputs", torch.zeros(most_tokens, self.config.hidden_size), persistent=False)
        self.register_buffer("undrawable", _undrawable(self.config), persistent=False)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Codec embeddings ``[n, embedding_size]``; zero for the token that stands for the prompt."""
        unspoken = (input_ids == self.config.tts_codec_mask_token_id).unsqueeze(-1)
        return self.model.embed_tokens(input_ids).masked_fill(unspoken, 0)

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
        inputs = self.inputs[: input_ids.shape[0]]
        inputs.copy_(self.proj(embeds))
        return self.model(None, self.rotary.begin(position_ids), intermediate_tensors, inputs)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Codec logits ``[n, vocabulary]``, of which only codes and end tokens can be drawn.

        The reference suppresses the start token alone: of the other ids its token2wav fails.
        """
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        if logits is not None:
            logits.masked_fill_(self.undrawable, float("-inf"))
        return logits

    @staticmethod
    def is_unused_checkpoint_weight(name: str) -> bool:
        """Whether vLLM's loader may leave out a file that has nothing but such tensors."""
        return is_of_another("talker", name)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the talker's part of the checkpoint."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def end_tokens(config: Any) -> list[int]:
    """Ids that end the speech, as in the reference (``talker_eos_token_id`` of its ``generate``)."""
    return [config.tts_codec_pad_token_id, config.tts_codec_end_token_id]


def _undrawable(config: Any) -> torch.Tensor:
    """Bool ``[vocabulary]``: ids that are neither codes that token2wav knows nor end tokens."""
    undrawable = torch.arange(config.vocab_size) >= getattr(config, CODES)
    undrawable[end_tokens(config)] = False
    undrawable[config.tts_codec_start_token_id] = True
    return undrawable
